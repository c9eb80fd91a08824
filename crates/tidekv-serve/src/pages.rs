//! The routes of a server, each with what it asks of the key: a route without a rule cannot be written.

use std::sync::Arc;

use axum::handler::Handler;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};

use crate::access::{Access, KeyRule};
use crate::api::error::ApiError;

/// A method and a path that a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// GET (and with it HEAD) or POST.
    pub method: Method,
    /// As axum writes it: `/v1/models/{*name}`.
    pub path: &'static str,
    /// What it asks of the key.
    pub rule: KeyRule,
}

/// A route and what answers it.
pub(crate) struct Page<S> {
    pub(crate) route: Route,
    answer: MethodRouter<S>,
}

impl<S: Clone + Send + Sync + 'static> Page<S> {
    pub(crate) fn get<T: 'static>(path: &'static str, rule: KeyRule, answer: impl Handler<T, S>) -> Self {
        Self { route: Route { method: Method::GET, path, rule }, answer: get(answer) }
    }

    pub(crate) fn post<T: 'static>(path: &'static str, rule: KeyRule, answer: impl Handler<T, S>) -> Self {
        Self { route: Route { method: Method::POST, path, rule }, answer: post(answer) }
    }
}

/// All pages behind their checks. `guide` is the document that lists them.
pub(crate) fn router<S>(pages: Vec<Page<S>>, access: Access, guide: &'static str) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let access = Arc::new(access);
    let mut router = Router::new();
    for Page { route, answer } in pages {
        let access = Arc::clone(&access);
        let guard = from_fn(move |request, next| {
            let access = Arc::clone(&access);
            async move { access.guard_route(route.rule, request, next).await }
        });
        router = router.route(route.path, answer.route_layer(guard));
    }
    router
        .fallback(async move |method: Method, uri: Uri| no_such_page(&method, &uri, guide))
        .method_not_allowed_fallback(wrong_method)
        .layer(Extension(Arc::clone(&access)))
        .layer(from_fn_with_state(access, Access::guard_site))
}

fn no_such_page(method: &Method, uri: &Uri, guide: &str) -> ApiError {
    let message = format!("there is no {method} {}: {guide} lists the pages", uri.path());
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let other = if method == Method::POST { "GET" } else { "POST" };
    let message = format!("{} does not take {method}: use {other}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_supported", message)
}
