//! Requests that `object_store` does not have, for facts about a bucket that no read and no write needs. They are sent
//! once, and their failure is a sentence, never an error.

use crate::address::Address;
use crate::client::{Client, Store, connection_options};
use crate::failure::{Doing, answer_of, explain};
use crate::service::{Connector, ForObject};
use crate::xml::{self, Element};
use futures_util::TryStreamExt;
use http::{Method, header};
use object_store::azure::AzureAuthorizer;
use object_store::client::{HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest};
use object_store::path::Path as Key;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{ClientOptions, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use url::Url;

/// A page of a list has at most 5,000 names of 1,024 characters; most are shorter.
const MAX_ANSWER_BYTES: usize = 8 << 20;
const EXPIRES: Duration = Duration::from_secs(300);

/// How a bucket is asked.
#[derive(Debug)]
pub(crate) struct Door {
    http: HttpClient,
    /// The URL of the bucket; empty for S3, whose client makes URLs.
    url: String,
    /// The account of Azure.
    account: String,
    is_signed: bool,
}

impl Door {
    pub(crate) fn new(
        url: String,
        account: String,
        mut options: ClientOptions,
        is_signed: bool,
    ) -> Result<Self> {
        for (key, value) in connection_options() {
            options = options.with_config(key, value);
        }
        Ok(Self {
            // These requests are few, and not those for ranges.
            http: Connector::Cloud(Arc::default()).connect(&options)?,
            url,
            account,
            is_signed,
        })
    }
}

/// What was found, and why that is not all.
#[derive(Debug, PartialEq, Eq)]
pub struct Findings<T> {
    /// What was found.
    pub found: Vec<T>,
    /// Why not all was found.
    pub reason: Option<String>,
}

impl<T> Findings<T> {
    pub(crate) fn none(reason: &str) -> Self {
        Self {
            found: Vec::new(),
            reason: Some(reason.to_owned()),
        }
    }
}

/// The answer to a GET of the bucket, or of an object in it, if it comes in time.
pub(crate) async fn ask(
    client: &Client,
    key: &str,
    query: &[(&str, &str)],
    until: Instant,
) -> Result<Element> {
    let answered = tokio::time::timeout_at(until, answer(client, key, query)).await;
    answered.map_err(|_| wrong("the service does not answer in time"))?
}

async fn answer(client: &Client, key: &str, query: &[(&str, &str)]) -> Result<Element> {
    let (store, door) = client
        .door()
        .ok_or_else(|| wrong("a server of files has no lists"))?;
    let key = Key::parse(key)?;
    let mut request = match store {
        Store::S3(store) if door.is_signed => {
            let options = SignedUrlOptions::new().with_query(query.iter().copied());
            let signed = store.signed_url_opts(Method::GET, &key, EXPIRES, &options);
            request(&signed.await?)?
        }
        Store::Google(store) if door.is_signed => {
            let mut request = request(&url_of(door, &key, query)?)?;
            let credential = store.credentials().get_credential().await?;
            let bearer = format!("Bearer {}", credential.bearer).parse();
            let bearer = bearer.map_err(|_| wrong("the token cannot be sent"))?;
            request.headers_mut().insert(header::AUTHORIZATION, bearer);
            request
        }
        Store::Azure(store) if door.is_signed => {
            let mut request = request(&url_of(door, &key, query)?)?;
            let credential = store.credentials().get_credential().await?;
            AzureAuthorizer::new(&credential, &door.account).try_authorize(&mut request)?;
            request
        }
        Store::S3(_) => return Err(wrong("requests have no signature")),
        _ => request(&url_of(door, &key, query)?)?,
    };
    request.extensions_mut().insert(ForObject);
    let body = fetch(door, request).await?;
    xml::parse(&body).ok_or_else(|| wrong("the answer is not the XML that was expected"))
}

async fn fetch(door: &Door, request: HttpRequest) -> Result<Vec<u8>> {
    let failed = |error: HttpError| object_store::Error::Generic {
        store: "bucket",
        source: Box::new(error),
    };
    let response = door.http.execute(request).await.map_err(failed)?;
    let mut frames = response.into_body().bytes_stream();
    let mut body = Vec::new();
    while let Some(frame) = frames.try_next().await.map_err(failed)? {
        if body.len() + frame.len() > MAX_ANSWER_BYTES {
            return Err(wrong("the answer is larger than 8 MiB"));
        }
        body.extend_from_slice(&frame);
    }
    Ok(body)
}

fn request(url: &Url) -> Result<HttpRequest> {
    let made =
        http::Request::get(url.as_str()).body(object_store::client::HttpRequestBody::empty());
    made.map_err(|_| wrong("the endpoint is no valid URL"))
}

fn url_of(door: &Door, key: &Key, query: &[(&str, &str)]) -> Result<Url> {
    let mut url = Url::parse(&door.url).map_err(|_| wrong("the endpoint is no valid URL"))?;
    if !key.as_ref().is_empty() {
        let mut segments = url
            .path_segments_mut()
            .map_err(|()| wrong("the endpoint is no valid URL"))?;
        segments.extend(key.as_ref().split('/'));
    }
    url.query_pairs_mut().extend_pairs(query);
    Ok(url)
}

/// A failure that is not an answer of the service.
#[derive(Debug)]
struct Wrong(&'static str);

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Wrong {}

fn wrong(what: &'static str) -> object_store::Error {
    let source = HttpError::new(HttpErrorKind::Unknown, Wrong(what));
    object_store::Error::Generic {
        store: "bucket",
        source: Box::new(source),
    }
}

/// Why a request failed, as the end of a sentence.
pub(crate) fn reason_of(
    address: &Address,
    error: &object_store::Error,
    permission: &str,
) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(one) = cause {
        if let Some(wrong) = one.downcast_ref::<Wrong>() {
            return wrong.0.to_owned();
        }
        cause = one.source();
    }
    match answer_of(error) {
        Some(answer) if answer.is_denied() => {
            format!("the credentials do not permit it ({answer}); it needs {permission}")
        }
        Some(answer) if answer.is_not_offered() => {
            format!("the service does not offer it ({answer})")
        }
        Some(answer) => format!("the service answered {answer}"),
        None => explain(Doing::Looking, address, error).message().to_owned(),
    }
}
