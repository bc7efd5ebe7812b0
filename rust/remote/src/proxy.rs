//! The proxy that the environment names, and requests that it refuses.

use crate::failure::chain;
use object_store::client::{HttpError, HttpErrorKind};
use reshard_core::error::Printable;
use std::error::Error as StdError;

const OF_TLS: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
const OF_HTTP: [&str; 4] = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];

/// What a proxy has answered to a request for a connection. `hyper-util` tells it in the text of its error alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// 407: it requires a name and a password.
    Unnamed,
    /// Another status, such as 403 for a host that it does not permit, or 502 for one that it does not reach.
    Other,
}

impl Refused {
    /// That of a failed request.
    pub(crate) fn of(error: &(dyn StdError + 'static)) -> Option<Self> {
        chain(error).find_map(|one| match &*one.to_string() {
            "tunnel error: proxy authorization required" => Some(Self::Unnamed),
            "tunnel error: unsuccessful" => Some(Self::Other),
            _ => None,
        })
    }

    /// What is wrong, and what to do.
    pub(crate) fn explained(self, is_tls: bool) -> (String, String) {
        let (names, url) = if is_tls {
            (OF_TLS, "https")
        } else {
            (OF_HTTP, "http")
        };
        let (name, place) = named(&names).unwrap_or((names[0], "unknown".to_owned()));
        let place = Printable(&place);
        let other = format!(
            "or let NO_PROXY name the host of the service, if {url} reaches it without the proxy"
        );
        match self {
            Self::Unnamed => (
                format!(
                    "the proxy {place}, which {name} names, requires a name and a password (407)"
                ),
                format!("give them in {name}, as http://NAME:PASSWORD@{place}, {other}"),
            ),
            Self::Other => (
                format!(
                    "the proxy {place}, which {name} names, makes no connection to the service"
                ),
                format!(
                    "let the proxy permit the host of the service (it answers 403 if it does not), {other}"
                ),
            ),
        }
    }
}

/// A failure as it was, or as one that is not tried again: that a name is required.
pub(crate) fn once_if_unnamed(error: HttpError) -> HttpError {
    match Refused::of(&error) {
        // `Unknown` is not tried again.
        Some(Refused::Unnamed) => HttpError::new(HttpErrorKind::Unknown, error),
        _ => error,
    }
}

/// The variable that names a proxy, for any requests.
pub(crate) fn variable() -> Option<&'static str> {
    let found = named(&OF_TLS).or_else(|| named(&OF_HTTP));
    found.map(|(name, _)| name)
}

/// The first variable that is set, and the host and the port in it, without a name and a password.
fn named(names: &[&'static str]) -> Option<(&'static str, String)> {
    names.iter().find_map(|name| {
        let value = std::env::var(name).ok().filter(|value| !value.is_empty())?;
        Some((*name, place_of(&value).to_owned()))
    })
}

fn place_of(value: &str) -> &str {
    let rest = value.split_once("://").map_or(value, |(_, rest)| rest);
    let place = rest.split(['/', '?', '#']).next().unwrap_or_default();
    place.rsplit('@').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_no_part_of_the_place() {
        for (value, place) in [
            ("http://proxy:3128", "proxy:3128"),
            ("proxy:3128/", "proxy:3128"),
            ("http://me:secret@proxy:3128/x", "proxy:3128"),
            ("http://me:se@cret@proxy", "proxy"),
            ("me:secret@proxy", "proxy"),
        ] {
            assert_eq!(place_of(value), place, "{value}");
        }
    }
}
