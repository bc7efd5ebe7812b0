//! The HTTP client below `object_store`: it keeps the status and the code of a failed answer, which `object_store` does not
//! give to its callers, and decides which failures pass.

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
use std::sync::Arc;

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

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let (inner, all, pace) = match self {
            Self::Cloud(pace) => (ReqwestConnector::default().connect(options)?, false, pace),
            Self::Files(pace) => {
                let client = reqwest::Client::builder()
                    .http1_only()
                    .connect_timeout(crate::client::CONNECT_TIMEOUT)
                    .read_timeout(crate::client::READ_TIMEOUT)
                    .user_agent(crate::client::USER_AGENT)
                    .build();
                let client = client.map_err(|error| object_store::Error::Generic {
                    store: "HTTP",
                    source: Box::new(error.without_url()),
                })?;
                (HttpClient::new(client), true, pace)
            }
        };
        let pace = Arc::clone(pace);
        Ok(HttpClient::new(Watched { inner, all, pace }))
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

#[derive(Debug)]
struct Watched {
    inner: HttpClient,
    all: bool,
    pace: Arc<Pace>,
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
        let sent = self.inner.execute(request).await;
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
        let answer = Answer::new(&parts, &beginning(body).await);
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
