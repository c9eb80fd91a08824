//! Who may do what.
//!
//! | request                        | bound to loopback                              | bound elsewhere (a key is set)   |
//! |--------------------------------|------------------------------------------------|----------------------------------|
//! | reads: status, metrics, page   | anybody                                        | anybody                          |
//! | inference                      | anybody                                        | the key                          |
//! | sleep and wake up              | the key where one is set; no foreign page      | the key; no foreign page         |
//! | limits and shares              | the key; refused where none is set; no foreign page | the key; no foreign page    |
//!
//! What a foreign page is, [`origin`] says.

use std::fmt;

use axum::http::{HeaderMap, StatusCode, header};

use crate::api::error::ApiError;
use crate::origin;

/// The secret that lets its bearer change things. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(String);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(...)")
    }
}

impl Key {
    /// Any text but nothing at all.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    /// In a time that does not depend on where the two differ.
    fn is(&self, other: &str) -> bool {
        let (own, other) = (self.0.as_bytes(), other.as_bytes());
        let differs = own.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b));
        own.len() == other.len() && differs == 0
    }
}

/// Keeps the rules of this module.
#[derive(Clone, Debug)]
pub struct Door {
    /// What must be shown.
    pub key: Option<Key>,
    /// Whether others than this machine can knock.
    pub is_public: bool,
}

impl Door {
    pub(crate) fn check_inference(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        match &self.key {
            Some(key) if self.is_public => check_key(key, headers),
            _ => Ok(()),
        }
    }

    /// Sleep and wake up.
    pub(crate) fn check_action(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        origin::check(headers, self.is_public)?;
        self.key.as_ref().map_or(Ok(()), |key| check_key(key, headers))
    }

    /// Limits and shares.
    pub(crate) fn check_limits(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        origin::check(headers, self.is_public)?;
        let Some(key) = &self.key else {
            let message =
                "limits and shares cannot be changed here: start with KVCACHED_WEB_API_KEY set, or use `kvctl limit`";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "no_key_set", message));
        };
        check_key(key, headers)
    }

    /// The key is ours and no business of the engine's; any other `Authorization` is passed on.
    pub(crate) fn hide_key(&self, headers: &mut HeaderMap) {
        if let Some(key) = &self.key
            && bearer(headers).is_some_and(|shown| key.is(shown))
        {
            headers.remove(header::AUTHORIZATION);
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, shown) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| shown.trim())
}

fn check_key(key: &Key, headers: &HeaderMap) -> Result<(), ApiError> {
    if bearer(headers).is_some_and(|shown| key.is(shown)) {
        return Ok(());
    }
    let message = "this needs the key of this router: send Authorization: Bearer KEY";
    Err(ApiError::new(StatusCode::UNAUTHORIZED, "wrong_key", message))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use axum::response::IntoResponse;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    fn status(result: Result<(), ApiError>) -> u16 {
        result.map_or_else(|error| error.into_response().status().as_u16(), |()| 200)
    }

    #[test]
    fn limits_need_a_key_and_a_key_must_be_shown() {
        let open = Door { key: None, is_public: false };
        let keyed = Door { key: Key::new("secret"), is_public: false };
        let (none, right) = (headers(&[]), headers(&[("authorization", "bearer secret")]));
        assert_eq!((status(open.check_limits(&none)), status(open.check_limits(&right))), (403, 403));
        assert_eq!((status(keyed.check_limits(&none)), status(keyed.check_limits(&right))), (401, 200));
        assert_eq!((status(open.check_action(&none)), status(keyed.check_action(&none))), (200, 401));
        for wrong in ["Bearer secre", "Bearer secrets", "Basic secret", "secret", "Bearer", ""] {
            assert_eq!(status(keyed.check_limits(&headers(&[("authorization", wrong)]))), 401, "{wrong}");
        }
    }

    #[test]
    fn inference_needs_the_key_only_where_others_can_knock() {
        let (none, right) = (headers(&[]), headers(&[("authorization", "Bearer secret")]));
        let at_home = Door { key: Key::new("secret"), is_public: false };
        let public = Door { is_public: true, ..at_home.clone() };
        assert_eq!((status(at_home.check_inference(&none)), status(public.check_inference(&none))), (200, 401));
        assert_eq!(status(public.check_inference(&right)), 200);
    }

    #[test]
    fn pages_of_others_change_nothing() {
        let door = Door { key: None, is_public: false };
        let from = |origin, host| status(door.check_action(&headers(&[("origin", origin), ("host", host)])));
        assert_eq!(from("http://127.0.0.1:8080", "127.0.0.1:8080"), 200);
        assert_eq!(from("http://localhost:8080", "localhost:8080"), 200);
        assert_eq!(from("http://[::1]:8080", "[::1]:8080"), 200);
        assert_eq!(from("http://127.0.0.1:9999", "127.0.0.1:8080"), 403, "another port is another site");
        assert_eq!(from("https://evil.example", "127.0.0.1:8080"), 403);
        assert_eq!(from("http://evil.example:8080", "evil.example:8080"), 403, "a name that was made to point here");
        assert_eq!(from("null", "127.0.0.1:8080"), 403);
        let public = Door { key: Key::new("secret"), is_public: true };
        let right = [("authorization", "Bearer secret"), ("host", "gpu7:8080")];
        let own = headers(&[right[0], right[1], ("origin", "http://gpu7:8080")]);
        let foreign = headers(&[right[0], right[1], ("origin", "http://evil.example")]);
        assert_eq!((status(public.check_limits(&own)), status(public.check_limits(&foreign))), (200, 403));
    }

    #[test]
    fn the_key_is_neither_printed_nor_passed_on() {
        let door = Door { key: Key::new(" secret\n"), is_public: false };
        assert!(!format!("{door:?}").contains("secret"));
        let mut own = headers(&[("authorization", "Bearer secret")]);
        door.hide_key(&mut own);
        assert!(own.is_empty());
        let mut others = headers(&[("authorization", "Bearer sk-of-the-engine")]);
        door.hide_key(&mut others);
        assert_eq!(others.len(), 1);
        assert_eq!((Key::new(""), Key::new("  ")), (None, None));
    }
}
