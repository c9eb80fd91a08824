//! The dashboard: one page of four files, which are a part of the program. Nothing on it comes from elsewhere, and the browser is told
//! to see to that.

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::Gateway;

const POLICY: &str = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

pub(super) fn pages() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/", get(async || file("text/html; charset=utf-8", include_str!("dashboard/index.html"))))
        .route("/app.css", get(async || file("text/css; charset=utf-8", include_str!("dashboard/app.css"))))
        .route("/icon.svg", get(async || file("image/svg+xml", include_str!("dashboard/icon.svg"))))
        .route("/app.js", get(async || file("text/javascript; charset=utf-8", include_str!("dashboard/app.js"))))
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, HeaderValue); 5] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // It belongs to this version of the program.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}
