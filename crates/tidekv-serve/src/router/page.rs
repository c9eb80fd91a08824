//! The dashboard: one page of a few files, which are a part of the program. Nothing on it comes from elsewhere, and the browser is told
//! to see to that.

use std::sync::Arc;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

use super::Gateway;
use crate::access::KeyRule;
use crate::pages::Page;

const POLICY: &str = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [(&str, &str, &str); 7] = [
    ("/", HTML, include_str!("dashboard/index.html")),
    ("/app.css", CSS, include_str!("dashboard/app.css")),
    ("/icon.svg", "image/svg+xml", include_str!("dashboard/icon.svg")),
    ("/app.js", SCRIPT, include_str!("dashboard/app.js")),
    ("/changes.js", SCRIPT, include_str!("dashboard/changes.js")),
    ("/parts.js", SCRIPT, include_str!("dashboard/parts.js")),
    ("/words.js", SCRIPT, include_str!("dashboard/words.js")),
];

pub(super) fn pages() -> [Page<Arc<Gateway>>; 7] {
    FILES.map(|(path, kind, text)| Page::get(path, KeyRule::Open, async move || file(kind, text)))
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, HeaderValue); 4] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // It belongs to this version of the program.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}
