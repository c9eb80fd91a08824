//! Where requests go and in which dialect.
//!
//! ```text
//!   http://10.0.0.7:8000/proxy   /v1/completions
//!   └ base URL ───────────────┘  └ path: of the dialect, or as given
//! ```
//!
//! Plain HTTP alone: a benchmark stands beside its server, and what encryption costs would be measured with it.

use std::fmt;
use std::str::FromStr;

use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};

/// The port of `http://` without one.
const HTTP_PORT: u16 = 80;

/// A model at a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The server.
    pub base_url: BaseUrl,
    /// What is said to it.
    pub api: Api,
    /// Where it is said.
    pub path: String,
    /// The model asked for, as the server calls it.
    pub model: String,
    /// What every request carries besides: a key, for instance. Sensitive values are never shown.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Endpoint {
    /// A model at the usual path of its dialect.
    pub fn new(base_url: BaseUrl, api: Api, model: impl Into<String>) -> Self {
        Self { base_url, api, path: api.path().to_owned(), model: model.into(), headers: Vec::new() }
    }

    /// The same with a key, which is sent as `Authorization: Bearer KEY` and never shown. A key with line ends or other
    /// control characters in it is refused.
    pub fn with_key(mut self, key: &str) -> Result<Self, EndpointError> {
        let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| EndpointError::BadKey)?;
        value.set_sensitive(true);
        self.headers.push((AUTHORIZATION, value));
        Ok(self)
    }

    /// The path that requests name, the prefix of the base URL included.
    pub fn target(&self) -> String {
        self.base_url.target(&self.path)
    }

    /// The whole address, for people.
    pub fn url(&self) -> String {
        format!("http://{}{}", self.base_url.authority(), self.target())
    }
}

/// What is said to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI's `/v1/completions`.
    Completions,
    /// OpenAI's `/v1/chat/completions`.
    Chat,
    /// SGLang's own `/generate`.
    SglangGenerate,
}

impl Api {
    /// Its usual path.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::SglangGenerate => "/generate",
        }
    }

    /// What a result calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completions => "completions",
            Self::Chat => "chat",
            Self::SglangGenerate => "sglang",
        }
    }

    /// Whether a prompt may be a list of token numbers.
    pub const fn takes_tokens(self) -> bool {
        match self {
            Self::Completions | Self::SglangGenerate => true,
            Self::Chat => false,
        }
    }
}

/// A server, and the path that all its pages begin with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BaseUrl {
    /// A name or an address; one of IPv6 without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Empty, or `/...` without a slash at its end.
    pub prefix: String,
}

impl BaseUrl {
    /// A server at a port.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port, prefix: String::new() }
    }

    /// Host and port as a `Host` header has them.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Where `path` lies. A base URL that ends in `/v1`, as OpenAI's clients want it, does not make that twice.
    pub fn target(&self, path: &str) -> String {
        let prefix = match self.prefix.strip_suffix("/v1") {
            Some(shorter) if path.starts_with("/v1/") => shorter,
            _ => &self.prefix,
        };
        format!("{prefix}{path}")
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority(), self.prefix)
    }
}

impl FromStr for BaseUrl {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let bad = |why| EndpointError::BadUrl { url: text.to_owned(), why };
        if text.starts_with("https://") {
            return Err(EndpointError::Encrypted { url: text.to_owned() });
        }
        let rest = text.strip_prefix("http://").unwrap_or(text);
        if rest.contains("://") {
            return Err(bad("only http:// is spoken"));
        }
        if !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad("it has a space or a letter that no URL has"));
        }
        if let Some(odd) = rest.chars().find(|letter| "?#@".contains(*letter)) {
            return Err(bad(match odd {
                '@' => "a user name does not belong here: give a key with OPENAI_API_KEY or --header",
                _ => "a query does not belong here",
            }));
        }
        let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let (host, port) = match authority.strip_prefix('[') {
            Some(v6) => v6.split_once(']').ok_or_else(|| bad("the bracket is not closed"))?,
            None => authority.find(':').map_or((authority, ""), |colon| authority.split_at(colon)),
        };
        if host.is_empty() {
            return Err(bad("the host is missing"));
        }
        if host.contains(['[', ']']) {
            return Err(bad("a bracket does not belong inside of a host"));
        }
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => HTTP_PORT,
            None => return Err(bad("what follows the host is no port")),
            Some(number) => number.parse().map_err(|_| bad("the port is not a number from 1 to 65535"))?,
        };
        if port == 0 {
            return Err(bad("the port is not a number from 1 to 65535"));
        }
        Ok(Self { host: host.to_owned(), port, prefix: path.trim_end_matches('/').to_owned() })
    }
}

/// Why there is no such endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// Not a URL of a server.
    #[error("{url:?} is no base URL: {why} (write http://HOST:PORT)")]
    BadUrl {
        /// As written.
        url: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// We do not encrypt.
    #[error(
        "{url:?} wants encryption: kvbench measures plain HTTP; reach the server itself, or a proxy beside it that encrypts"
    )]
    Encrypted {
        /// As written.
        url: String,
    },
    /// A key that no header can carry.
    #[error("the key has characters that no HTTP header can carry")]
    BadKey,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> Result<(String, u16, String), EndpointError> {
        text.parse().map(|url: BaseUrl| (url.host, url.port, url.prefix))
    }

    #[test]
    fn urls_as_people_write_them() {
        for (text, host, port, prefix) in [
            ("http://localhost:8000", "localhost", 8000, ""),
            ("http://localhost:8000/", "localhost", 8000, ""),
            ("127.0.0.1:9", "127.0.0.1", 9, ""),
            ("http://gpu7", "gpu7", 80, ""),
            ("http://[::1]:8000/v1", "::1", 8000, "/v1"),
            ("http://a.b/proxy/llm/", "a.b", 80, "/proxy/llm"),
        ] {
            assert_eq!(parsed(text), Ok((host.to_owned(), port, prefix.to_owned())), "{text}");
        }
    }

    #[test]
    fn refusals_say_why() {
        for (text, why) in [
            ("", "host is missing"),
            ("https://a", "encryption"),
            ("ftp://a", "only http://"),
            ("http://a:0", "port"),
            ("http://a:99999", "port"),
            ("http://[::1:80", "bracket"),
            ("http://[::1]80", "no port"),
            ("[[]", "bracket"),
            ("http://me:secret@a", "user name"),
            ("http://a?x=1", "query"),
            ("http://a b", "space"),
        ] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_base_url_with_v1_does_not_say_it_twice() {
        let at = |base: &str, path| base.parse::<BaseUrl>().unwrap().target(path);
        assert_eq!(at("http://a/v1", "/v1/completions"), "/v1/completions");
        assert_eq!(at("http://a/x/v1/", "/v1/completions"), "/x/v1/completions");
        assert_eq!(at("http://a/v1", "/metrics"), "/v1/metrics");
        assert_eq!(at("http://a", "/v1/completions"), "/v1/completions");
    }

    #[test]
    fn a_key_is_sent_and_not_shown() {
        let endpoint = Endpoint::new(BaseUrl::new("a", 1), Api::Chat, "m").with_key("hush-hush").unwrap();
        assert_eq!(endpoint.headers[0].1.as_bytes(), b"Bearer hush-hush");
        assert!(!format!("{endpoint:?}").contains("hush"), "{endpoint:?}");
        assert_eq!(endpoint.clone().with_key("a\nb").unwrap_err(), EndpointError::BadKey);
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_the_same(text in "(http://)?[a-z0-9.\\[\\]:@/?# -]{0,30}") {
            if let Ok(url) = text.parse::<BaseUrl>() {
                prop_assert_eq!(url.to_string().parse::<BaseUrl>(), Ok(url));
            }
        }
    }
}
