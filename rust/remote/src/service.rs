//! The HTTP client below `object_store`: it keeps the status and the code of a failed answer, which `object_store` does not
//! give to its callers, and decides which failures pass.

use crate::client::READ_TIMEOUT;
use crate::failure::Answer;
use crate::pace::Pace;
use crate::{proxy, tls};
use async_trait::async_trait;
use futures_util::StreamExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};
use std::sync::{Arc, OnceLock};
use tokio::time::{Instant, timeout};

/// Marks the requests for objects, in contrast to those for credentials.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForObject;

/// Marks requests that are sent once: after a lost answer, a second one would meet what the first one has done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Once;

/// Whether a request is for an object. `object_store` passes no mark on to those of uploads in parts and of removals; no
/// request for credentials has such a query or method.
fn is_for_object(request: &HttpRequest) -> bool {
    const NAMES: [&str; 4] = ["uploads", "uploadId", "delete", "comp"];
    let names = request.uri().query().unwrap_or_default().split('&');
    request.extensions().get::<ForObject>().is_some()
        || request.method() == http::Method::DELETE
        || names
            .map(|pair| pair.split('=').next().unwrap_or_default())
            .any(|name| NAMES.contains(&name))
}

/// Makes the clients.
#[derive(Debug)]
pub(crate) enum Connector {
    /// For a cloud: requests with the mark are for objects.
    Cloud(Arc<Pace>),
    /// For a server of files: all requests are for objects, and redirections are followed.
    Files(Arc<Pace>),
}

/// Larger bodies can take long on their way.
const LARGE_BODY_BYTES: usize = 1 << 20;
/// How often a large body is sent that has no answer in time. Each time it is waited for longer.
const N_SENT: usize = 3;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let (inner, all, pace) = match self {
            Self::Cloud(pace) => (ReqwestConnector::default().connect(options)?, false, pace),
            Self::Files(pace) => {
                let client = reqwest::Client::builder()
                    .http1_only()
                    .connect_timeout(crate::client::CONNECT_TIMEOUT)
                    .read_timeout(READ_TIMEOUT)
                    .user_agent(crate::client::USER_AGENT)
                    .build();
                let client = client.map_err(|error| object_store::Error::Generic {
                    store: "HTTP",
                    source: Box::new(error.without_url()),
                })?;
                (HttpClient::new(client), true, pace)
            }
        };
        // Its limit for reads begins with a request, and so would end bodies that are still on their way.
        let unlimited = options.clone().with_read_timeout_disabled();
        Ok(HttpClient::new(Watched {
            inner,
            sender: OnceLock::new(),
            options: unlimited,
            all,
            pace: Arc::clone(pace),
        }))
    }
}

/// A request that may have been carried out, though no answer came.
#[derive(Debug)]
pub(crate) struct Lost(pub(crate) HttpErrorKind, HttpError);

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.1.fmt(f)
    }
}

impl std::error::Error for Lost {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.1.source()
    }
}

/// A large body has no answer in time.
#[derive(Debug)]
struct NoAnswer;

impl std::fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no answer in time")
    }
}

impl std::error::Error for NoAnswer {}

#[derive(Debug)]
struct Watched {
    inner: HttpClient,
    /// For large bodies, see [`Watched::send`]. Made when it is first used.
    sender: OnceLock<HttpClient>,
    options: ClientOptions,
    all: bool,
    pace: Arc<Pace>,
}

impl Watched {
    /// Sends a request. The time of a large body is that of the network, which is learned: without an answer in time it is
    /// sent again, and waited for four times as long. The answer is as small as those of all changes.
    async fn send(&self, request: HttpRequest, is_once: bool) -> Result<HttpResponse, HttpError> {
        let n_bytes = request.body().content_length();
        if n_bytes < LARGE_BODY_BYTES {
            return self.inner.execute(request).await;
        }
        let sender = if let Some(made) = self.sender.get() {
            made
        } else {
            let made = ReqwestConnector::default().connect(&self.options);
            let made = made.map_err(|error| HttpError::new(HttpErrorKind::Connect, error))?;
            self.sender.get_or_init(|| made)
        };
        for number in 0..if is_once { 1 } else { N_SENT } {
            if number > 0 {
                crate::object::count_failed();
                crate::object::count_request();
            }
            let (begun, send_for) = (Instant::now(), self.pace.send_for(n_bytes));
            if let Ok(sent) = timeout(send_for, sender.execute(request.clone())).await {
                if sent
                    .as_ref()
                    .is_ok_and(|answer| answer.status().is_success())
                {
                    self.pace.note_sent(begun.elapsed(), n_bytes);
                }
                return sent;
            }
            self.pace.note_sent(send_for, n_bytes);
        }
        Err(HttpError::new(HttpErrorKind::Timeout, NoAnswer))
    }
}

#[async_trait]
impl HttpService for Watched {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_for_object = self.all || is_for_object(&request);
        let is_once = request.extensions().get::<Once>().is_some();
        if is_for_object {
            crate::object::count_request();
        }
        let host = tls::host_of(request.uri());
        let sent = self.send(request, is_once).await;
        let is_throttled = match &sent {
            Ok(response) => matches!(response.status().as_u16(), 429 | 503),
            Err(error) => error.kind() == HttpErrorKind::Timeout,
        };
        if is_for_object && is_throttled {
            self.pace.note_throttled();
        }
        if is_for_object && sent.is_err() {
            crate::object::count_failed();
        }
        let sent =
            sent.map_err(|error| proxy::once_if_unnamed(tls::once_if_untrusted(error, &host)));
        let response = sent.map_err(|error| match error.kind() {
            // Without a connection nothing was sent. `Unknown` is not tried again.
            kind if !is_once || kind == HttpErrorKind::Connect => error,
            kind => HttpError::new(HttpErrorKind::Unknown, Lost(kind, error)),
        })?;
        let status = response.status();
        if !is_for_object || status.is_success() || status == http::StatusCode::NOT_MODIFIED {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let text = timeout(READ_TIMEOUT, beginning(body)).await;
        let answer = Answer::new(&parts, &text.unwrap_or_default());
        if answer.passes() {
            crate::object::count_failed();
        }
        // `Request` is tried again, `Unknown` is not.
        let kind = if answer.passes() && !is_once {
            HttpErrorKind::Request
        } else {
            HttpErrorKind::Unknown
        };
        Err(HttpError::new(kind, answer))
    }
}

/// The beginning of the body of a failed answer, which names the failure.
async fn beginning(body: HttpResponseBody) -> Vec<u8> {
    let mut frames = body.bytes_stream();
    let mut found = Vec::new();
    while found.len() < crate::failure::MAX_BODY_BYTES
        && let Some(Ok(frame)) = frames.next().await
    {
        found.extend_from_slice(&frame);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;
    use tokio::runtime::Builder;

    /// Answers after some seconds.
    #[derive(Debug)]
    struct Slow(u64, Arc<AtomicUsize>);

    #[async_trait]
    impl HttpService for Slow {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            self.1.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(self.0)).await;
            Ok(http::Response::new(Bytes::new().into()))
        }
    }

    /// How often each of some bodies is sent, and whether it has an answer.
    fn sent(seconds: u64, is_once: bool) -> Vec<(usize, bool)> {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        let n_sent = Arc::new(AtomicUsize::new(0));
        let client = || HttpClient::new(Slow(seconds, Arc::clone(&n_sent)));
        let watched = Watched {
            inner: client(),
            sender: OnceLock::from(client()),
            options: ClientOptions::new(),
            all: false,
            pace: Arc::default(),
        };
        let body = Bytes::from(vec![0; 2 << 20]);
        runtime.unwrap().block_on(async {
            let mut found = Vec::new();
            for _ in 0..3 {
                let mut request = http::Request::put("http://host/key")
                    .body(body.clone().into())
                    .unwrap();
                if is_once {
                    request.extensions_mut().insert(Once);
                }
                let answer = watched.call(request).await;
                found.push((n_sent.swap(0, Ordering::SeqCst), answer.is_ok()));
            }
            found
        })
    }

    #[test]
    fn a_body_that_takes_long_on_its_way_is_waited_for() {
        assert_eq!(sent(10, false), [(1, true); 3]);
        assert_eq!(sent(100, false), [(2, true), (1, true), (1, true)]);
        assert_eq!(sent(400, false), [(3, true), (1, true), (1, true)]);
        assert_eq!(sent(100_000, false), [(3, false); 3]);
        // A body that is sent once is not sent again, but waited for longer the next time.
        assert_eq!(sent(100, true), [(1, false), (1, true), (1, true)]);
    }
}
