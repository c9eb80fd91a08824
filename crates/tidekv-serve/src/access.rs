//! Who may ask: under which name, from whose page, with which key. One check before every route of `kvserve` and of the router.
//!
//! | what a request says            | answered                                                                     |
//! |--------------------------------|------------------------------------------------------------------------------|
//! | `Host`                         | an IP address, `localhost`, this machine's name, or a configured name; or none at all |
//! | `Origin`                       | the same as `Host`, or a listed origin; or none at all                       |
//! | `Sec-Fetch-Site` without `Origin` | anything but `cross-site` and `same-site`; a visit of the page `/` always |
//!
//! A browser lets every page send requests anywhere, to this machine too, and says in these headers whose page is asking. Programs send
//! none of them but `Host`. Whoever owns a name can make it point here, and a page of that name is then the "same origin" (DNS rebinding).
//! Nobody can do that with an IP address, so any address is fine. A browser always sends `Host`, so who sends none is no browser. There is
//! no exception for `/health`: load balancers and probes ask by address or without `Host`, and a page could read its answer.
//!
//! | what a route asks of the key | listens on loopback    | listens elsewhere (a key is set) | routes                                     |
//! |------------------------------|------------------------|----------------------------------|--------------------------------------------|
//! | [`KeyRule::Open`]            | nothing                | nothing                          | health, metrics, version; the router's status and dashboard |
//! | [`KeyRule::BeyondLoopback`]  | nothing                | the key                          | inference through the router               |
//! | [`KeyRule::IfSet`]           | the key, where one is set | the key                       | `kvserve`: `/v1/*`, tokens, sleep; the router: sleep |
//! | [`KeyRule::Required`]        | the key; refused where none is set | the key              | limits and shares                          |

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::api::error::ApiError;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
/// The page for people: a link on another site may lead to it.
const PAGE: &str = "/";
/// So much of a name is repeated in a refusal.
const SHOWN_MAX: usize = 100;

/// The secret that lets its bearer ask. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(...)")
    }
}

impl ApiKey {
    /// One line of printable ASCII, as a header can carry it, without the spaces around it. `None` for anything else.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let is_key = !text.is_empty() && text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
        is_key.then(|| Self(text.to_owned()))
    }

    /// In a time that does not depend on where the two differ.
    fn is(&self, other: &str) -> bool {
        let (own, other) = (self.0.as_bytes(), other.as_bytes());
        let differs = own.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b));
        own.len() == other.len() && differs == 0
    }

    fn is_shown(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.split_once(' '));
        shown.is_some_and(|(scheme, shown)| scheme.eq_ignore_ascii_case("bearer") && self.is(shown.trim()))
    }
}

/// What a route asks of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRule {
    /// Nothing: it only shows.
    Open,
    /// The key, where others than this machine can connect.
    BeyondLoopback,
    /// The key, where one is set.
    IfSet,
    /// The key; where none is set it is refused.
    Required,
}

/// What is neither a host name nor an origin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// Not a name.
    #[error("{text:?} is not a host name: write it without http:// and without a port, as in gpu7.example.com")]
    Host {
        /// As written.
        text: String,
    },
    /// Not an origin.
    #[error(
        "{text:?} is not an origin: write it as browsers do, as in https://chat.example.com, with a port where it has one and without a path"
    )]
    Origin {
        /// As written.
        text: String,
    },
    /// Everybody.
    #[error("the origin \"*\" would let every page that anybody here opens compute and read: name the sites")]
    EveryOrigin,
}

/// A name that the server answers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostName(String);

impl FromStr for HostName {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<Self, AccessError> {
        match name_of(text.trim()) {
            Some(name) if name.len() == text.trim().len() && !name.contains('*') => Ok(Self(name.to_owned())),
            _ => Err(AccessError::Host { text: text.to_owned() }),
        }
    }
}

/// A site whose pages may ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(String);

impl FromStr for Origin {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<Self, AccessError> {
        let origin = text.trim();
        match origin.split_once("://") {
            _ if origin == "*" => Err(AccessError::EveryOrigin),
            Some((scheme, authority)) if !scheme.is_empty() && name_of(authority).is_some() => {
                Ok(Self(origin.to_owned()))
            }
            _ => Err(AccessError::Origin { text: text.to_owned() }),
        }
    }
}

/// The name in `NAME:PORT`; an IPv6 address has its brackets.
fn name_of(authority: &str) -> Option<&str> {
    let parsed: Authority = authority.parse().ok()?;
    let name = authority.get(..parsed.host().len())?;
    // A user name would stand before the host.
    (name == parsed.host() && !name.is_empty()).then_some(name)
}

/// Keeps the rules of this module.
#[derive(Clone, Debug, Default)]
pub struct Access {
    key: Option<ApiKey>,
    hosts: Vec<HostName>,
    origins: Vec<Origin>,
    /// Whether others than this machine can connect.
    is_public: bool,
}

impl Access {
    /// For a server that is not bound yet.
    pub fn new(key: Option<ApiKey>, hosts: Vec<HostName>, origins: Vec<Origin>) -> Self {
        Self { key, hosts, origins, is_public: false }
    }

    /// The same for an address: knows the name by which it was given, and this machine's own. `None` where others can connect and there
    /// is no key.
    pub(crate) fn listening_on(mut self, host: &str, address: SocketAddr) -> Option<Self> {
        // What `hostname` prints; it may have a domain.
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let own = own.trim();
        let names = [host, own, own.split('.').next().unwrap_or_default()];
        self.hosts.extend(names.iter().filter_map(|name| name.parse().ok()));
        self.is_public = !address.ip().to_canonical().is_loopback();
        (self.key.is_some() || !self.is_public).then_some(self)
    }

    /// Whether there is a key.
    pub(crate) fn has_key(&self) -> bool {
        self.key.is_some()
    }

    fn is_ours(&self, name: &str) -> bool {
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        let name = name.strip_suffix('.').unwrap_or(name);
        bare.parse::<IpAddr>().is_ok()
            || name.eq_ignore_ascii_case("localhost")
            || self.hosts.iter().any(|known| known.0.eq_ignore_ascii_case(name))
    }

    /// The listed origin that asks, if it is one.
    fn check_site(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
        let in_headers = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or_default());
        let mut host = None;
        for authority in in_headers.chain(uri.authority().map(Authority::as_str)) {
            if !name_of(authority).is_some_and(|name| self.is_ours(name)) {
                return Err(foreign_host(authority));
            }
            host = Some(authority);
        }
        let Some(origin) = headers.get(header::ORIGIN) else {
            let says = |name: &HeaderName, word: &str| headers.get(name).is_some_and(|value| value == word);
            let is_visit = method == Method::GET && uri.path() == PAGE && says(&FETCH_MODE, "navigate");
            let is_foreign = says(&FETCH_SITE, "cross-site") || says(&FETCH_SITE, "same-site");
            return if is_foreign && !is_visit { Err(foreign_origin("")) } else { Ok(None) };
        };
        let text = origin.to_str().unwrap_or_default();
        if self.origins.iter().any(|listed| listed.0.eq_ignore_ascii_case(text)) {
            return Ok(Some(origin.clone()));
        }
        // Whatever stands before us may speak https.
        let authority = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        match (authority, host) {
            (Some(authority), Some(host)) if authority.eq_ignore_ascii_case(host) => Ok(None),
            _ => Err(foreign_origin(text)),
        }
    }

    fn check_key(&self, rule: KeyRule, headers: &HeaderMap) -> Result<(), ApiError> {
        let is_asked_for = match rule {
            KeyRule::Open => false,
            KeyRule::BeyondLoopback => self.is_public,
            KeyRule::IfSet | KeyRule::Required => true,
        };
        match &self.key {
            Some(key) if is_asked_for && !key.is_shown(headers) => {
                let message = "this needs the key of this server: send Authorization: Bearer KEY";
                Err(ApiError::new(StatusCode::UNAUTHORIZED, "wrong_key", message))
            }
            None if rule == KeyRule::Required => {
                let message = "limits and shares cannot be changed here: start with KVCACHED_WEB_API_KEY or --api-key-file, \
                               or use `kvctl limit`";
                Err(ApiError::new(StatusCode::FORBIDDEN, "no_key_set", message))
            }
            _ => Ok(()),
        }
    }

    /// The layer before one route. The key is ours and no business of an engine's; any other `Authorization` is passed on.
    pub(crate) async fn guard_route(&self, rule: KeyRule, mut request: Request, next: Next) -> Response {
        if let Err(refusal) = self.check_key(rule, request.headers()) {
            return refusal.into_response();
        }
        if self.key.as_ref().is_some_and(|key| key.is_shown(request.headers())) {
            request.headers_mut().remove(header::AUTHORIZATION);
        }
        next.run(request).await
    }

    /// The layer before all routes.
    pub(crate) async fn guard_site(State(access): State<Arc<Self>>, mut request: Request, next: Next) -> Response {
        let checked = access.check_site(request.method(), request.uri(), request.headers());
        let mut response = match &checked {
            Err(refusal) => refusal.clone().into_response(),
            Ok(Some(_)) if request.method() == Method::OPTIONS => preflight(request.headers()),
            Ok(_) => {
                // An engine behind the router would compare them with a name and a list of its own.
                request.headers_mut().remove(header::ORIGIN);
                request.headers_mut().remove(FETCH_SITE);
                next.run(request).await
            }
        };
        if let Ok(Some(origin)) = checked {
            response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            response.headers_mut().append(header::VARY, HeaderValue::from_static("origin"));
        }
        // Beyond loopback, and without TLS, browsers do not say who embeds an answer as a picture or a script: they keep it from such pages.
        response.headers_mut().insert(RESOURCE_POLICY, HeaderValue::from_static("same-origin"));
        response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        response
    }
}

/// What a browser asks before a page of a listed origin may send its request.
fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    response
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_MAX).collect()
}

fn foreign_host(authority: &str) -> ApiError {
    let name = shown(name_of(authority).unwrap_or(authority));
    let message = format!(
        "this server does not answer to the name {name:?}: ask by IP address or as localhost, or start it with --allowed-hosts {name}"
    );
    ApiError::new(StatusCode::FORBIDDEN, "foreign_host", message)
}

fn foreign_origin(origin: &str) -> ApiError {
    let whose = if origin.is_empty() { String::new() } else { format!(" ({})", shown(origin)) };
    let message = format!(
        "a page of another site{whose} may not ask here: start the server with --allowed-origins ORIGIN if the site is yours"
    );
    ApiError::new(StatusCode::FORBIDDEN, "foreign_origin", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    fn status(result: Result<(), ApiError>) -> u16 {
        result.map_or_else(|error| error.into_response().status().as_u16(), |()| 200)
    }

    fn at(key: Option<&str>, address: &str) -> Access {
        let key = key.and_then(ApiKey::new);
        Access::new(key, Vec::new(), Vec::new()).listening_on("gpu7", address.parse().unwrap()).unwrap()
    }

    #[test]
    fn what_the_key_is_asked_for() {
        use KeyRule::{BeyondLoopback, IfSet, Open, Required};
        let (none, right) = (headers(&[]), headers(&[("authorization", "bearer secret")]));
        let all = [Open, BeyondLoopback, IfSet, Required];
        for (access, without, with) in [
            (at(None, "127.0.0.1:1"), [200, 200, 200, 403], [200, 200, 200, 403]),
            (at(Some("secret"), "[::1]:1"), [200, 200, 401, 401], [200; 4]),
            (at(Some("secret"), "[::ffff:127.0.0.1]:1"), [200, 200, 401, 401], [200; 4]),
            (at(Some("secret"), "0.0.0.0:1"), [200, 401, 401, 401], [200; 4]),
        ] {
            assert_eq!(all.map(|rule| status(access.check_key(rule, &none))), without, "{access:?}");
            assert_eq!(all.map(|rule| status(access.check_key(rule, &right))), with, "{access:?}");
        }
        for wrong in ["Bearer secre", "Bearer secrets", "Basic secret", "secret", "Bearer", ""] {
            let access = at(Some("secret"), "127.0.0.1:1");
            assert_eq!(status(access.check_key(Required, &headers(&[("authorization", wrong)]))), 401, "{wrong}");
        }
        assert!(Access::default().listening_on("0.0.0.0", "0.0.0.0:1".parse().unwrap()).is_none());
    }

    #[test]
    fn a_key_is_one_printable_line_and_is_not_printed() {
        assert_eq!(ApiKey::new(" a secret\n"), ApiKey::new("a secret"));
        for wrong in ["", "  ", "two\nlines", "caf\u{e9}", "a\0b"] {
            assert_eq!(ApiKey::new(wrong), None, "{wrong:?}");
        }
        assert!(!format!("{:?}", at(Some("secret"), "127.0.0.1:1")).contains("secret"));
    }

    #[test]
    fn names_and_origins_as_people_write_them() {
        for right in ["gpu7", "gpu7.example.com", "host.docker.internal", "10.0.0.1", "[::1]"] {
            assert!(right.parse::<HostName>().is_ok(), "{right}");
        }
        for wrong in ["", "http://gpu7", "gpu7:8000", "a b", "user@gpu7", "gpu7/", "*", "*.example.com"] {
            assert!(wrong.parse::<HostName>().is_err(), "{wrong}");
        }
        for right in ["https://chat.example.com", "http://localhost:3000", "chrome-extension://abcdef"] {
            assert!(right.parse::<Origin>().is_ok(), "{right}");
        }
        for wrong in ["", "null", "chat.example.com", "https://a.example/", "https://", "https://u@a.example"] {
            assert!(matches!(wrong.parse::<Origin>(), Err(AccessError::Origin { .. })), "{wrong}");
        }
        assert_eq!("*".parse::<Origin>(), Err(AccessError::EveryOrigin));
    }

    #[test]
    fn whose_page_asks() {
        let access = Access::new(None, Vec::new(), vec!["https://app.example".parse().unwrap()]);
        let access = access.listening_on("gpu7", "127.0.0.1:8080".parse().unwrap()).unwrap();
        let ask = |pairs: &[(&'static str, &'static str)], uri: &'static str| {
            status(access.check_site(&Method::GET, &Uri::from_static(uri), &headers(pairs)).map(drop))
        };
        let from = |origin, host| ask(&[("origin", origin), ("host", host)], "/metrics");
        assert_eq!(from("http://127.0.0.1:8080", "127.0.0.1:8080"), 200);
        assert_eq!(from("http://localhost:8080", "LOCALHOST:8080"), 200);
        assert_eq!(from("https://gpu7", "gpu7"), 200, "TLS ends before us");
        assert_eq!(from("http://[::1]:8080", "[::1]:8080"), 200);
        assert_eq!(from("https://app.example", "127.0.0.1:8080"), 200);
        assert_eq!(from("http://127.0.0.1:9999", "127.0.0.1:8080"), 403, "another port is another site");
        assert_eq!(from("http://evil.example:8080", "evil.example:8080"), 403, "a name that was made to point here");
        for evil in ["https://evil.example", "null", "", "https://app.example.evil.example", "https://app.example:1"] {
            assert_eq!(from(evil, "127.0.0.1:8080"), 403, "{evil}");
        }
        for (host, answer) in
            [("10.1.2.3", 200), ("[2001:db8::1]:1", 200), ("localhost.", 200), ("gpu7.:1", 200), ("evil.example", 403)]
        {
            assert_eq!(ask(&[("host", host)], "/metrics"), answer, "{host}");
        }
        for host in
            ["", "x@127.0.0.1", "127.0.0.1.evil.example", "localhost.evil.example", "gpu7 ", "0x7f.1", "[::1", "a:b:c"]
        {
            assert_eq!(ask(&[("host", host)], "/metrics"), 403, "{host}");
        }
        assert_eq!(ask(&[("host", "127.0.0.1"), ("host", "evil.example")], "/metrics"), 403);
        assert_eq!(ask(&[("host", "127.0.0.1")], "http://evil.example/metrics"), 403);
        assert_eq!(ask(&[], "/metrics"), 200, "no browser");
        let own = ("host", "127.0.0.1:8080");
        for (site, answer) in [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)] {
            assert_eq!(ask(&[own, ("sec-fetch-site", site)], "/metrics"), answer, "{site}");
            let visit = [own, ("sec-fetch-site", site), ("sec-fetch-mode", "navigate")];
            assert_eq!((ask(&visit, "/"), ask(&visit, "/metrics")), (200, answer), "{site}");
        }
        assert_eq!(ask(&[own, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")], "/"), 403);
        assert_eq!(ask(&[own, ("sec-fetch-site", "cross-site"), ("origin", "https://app.example")], "/metrics"), 200);
    }
}
