//! Which page of a browser asks: pages of other sites change nothing here.
//!
//! A browser lets every page send requests anywhere, to this machine too, and says in `Origin` whose page is asking. Programs send none. On
//! a loopback address only a page from a loopback name is ours, whatever the request's `Host` says: a name of somebody else can be
//! made to point here.

use axum::http::{HeaderMap, StatusCode, Uri, header};

use crate::api::error::ApiError;

/// Refuses what a page of another site asks for. `is_public` says whether others than this machine can connect.
pub(crate) fn check(headers: &HeaderMap, is_public: bool) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin: Option<Uri> = origin.to_str().ok().and_then(|origin| origin.parse().ok());
    let authority = origin.as_ref().and_then(Uri::authority);
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let is_ours = authority
        .is_some_and(|authority| Some(authority.as_str()) == host && (is_public || is_loopback_name(authority.host())));
    if is_ours {
        return Ok(());
    }
    Err(ApiError::new(StatusCode::FORBIDDEN, "foreign_origin", "a page of another site may not change anything here"))
}

fn is_loopback_name(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}
