//! Failed requests as errors of the core: what was done, the object, the status, and what to do.

use crate::address::{Address, Service};
use crate::proxy::{self, Refused};
use crate::service::Lost;
use crate::tls;
use http::StatusCode;
use object_store::client::{HttpError, HttpErrorKind};
use reshard_core::error::Printable;
use reshard_core::{Error, Kind};
use std::error::Error as StdError;
use std::fmt;
use std::path::Path;

/// Error numbers of the system, by which callers tell passing failures from damage.
const EACCES: i32 = 13;
const EAGAIN: i32 = 11;
const ETIMEDOUT: i32 = 110;
const ECONNREFUSED: i32 = 111;
const ECOMM: i32 = 70;
const ESTALE: i32 = 116;

/// What is read of the body of a failed answer.
pub(crate) const MAX_BODY_BYTES: usize = 16 << 10;

/// What a request was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    Connecting,
    Opening,
    Looking,
    Listing,
    Reading,
    Writing,
    Removing,
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connecting => "connecting to",
            Self::Opening => "opening",
            Self::Looking => "looking at",
            Self::Listing => "listing",
            Self::Reading => "reading",
            Self::Writing => "writing",
            Self::Removing => "removing",
        })
    }
}

/// A failed answer of a service. It holds nothing of the request, which is signed.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    status: StatusCode,
    /// Such as `NoSuchBucket`; empty if unknown.
    code: String,
    /// The region in which the bucket is, if the service says so.
    region: Option<String>,
}

impl Answer {
    pub(crate) fn new(parts: &http::response::Parts, body: &[u8]) -> Self {
        let body = String::from_utf8_lossy(&body[..body.len().min(MAX_BODY_BYTES)]);
        let header = |name: &str| Some(parts.headers.get(name)?.to_str().ok()?.to_owned());
        let code = element(&body, "Code").or_else(|| header("x-ms-error-code"));
        let region = header("x-amz-bucket-region").or_else(|| element(&body, "Region"));
        Self {
            status: parts.status,
            code: code.unwrap_or_default(),
            region,
        }
    }

    fn lacks_bucket(&self) -> bool {
        matches!(&*self.code, "NoSuchBucket" | "ContainerNotFound")
    }

    /// Whether the code is this one.
    pub(crate) fn is_code(&self, code: &str) -> bool {
        self.code == code
    }

    /// Whether the credentials do not permit the request.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(
            self.status,
            StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED
        )
    }

    /// Whether the service does not know such a request.
    pub(crate) fn is_not_offered(&self) -> bool {
        matches!(
            self.status,
            StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED
        )
    }

    /// Whether the same request can succeed later.
    pub(crate) fn passes(&self) -> bool {
        self.status.is_server_error() && self.status != StatusCode::NOT_IMPLEMENTED
            || matches!(
                self.status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
            )
            || matches!(
                &*self.code,
                "RequestTimeout" | "OperationAborted" | "ConditionalRequestConflict"
            )
    }
}

/// What a failed answer to a request that creates an object means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The object exists.
    Exists,
    /// Nothing was written; the same request can succeed.
    Busy,
    /// Nothing was written, and the same request cannot succeed.
    Final,
    /// The object may have been written.
    Unclear,
}

/// See [`Refusal`]. S3 answers 409 while two requests meet, and Azure if the object exists. S3 answers 400 to a body that
/// does not arrive.
pub(crate) fn refusal_of(answer: &Answer) -> Refusal {
    match answer.status.as_u16() {
        412 => Refusal::Exists,
        409 if answer.code == "BlobAlreadyExists" => Refusal::Exists,
        409 | 429 => Refusal::Busy,
        408 | 500..=599 => Refusal::Unclear,
        _ if answer.code == "RequestTimeout" => Refusal::Unclear,
        _ => Refusal::Final,
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status.as_u16())?;
        match (self.code.is_empty(), self.status.canonical_reason()) {
            (false, _) => write!(f, " {}", Printable(&self.code)),
            (true, Some(reason)) => write!(f, " {reason}"),
            (true, None) => Ok(()),
        }
    }
}

impl StdError for Answer {}

/// The text of the first element of XML with a name, if it is a plain word.
fn element(body: &str, name: &str) -> Option<String> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once('<')?;
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (!text.is_empty() && text.len() <= 64 && text.chars().all(is_word)).then(|| text.to_owned())
}

/// The answer that an error of `object_store` holds.
pub(crate) fn answer_of(error: &object_store::Error) -> Option<&Answer> {
    chain(error).find_map(|one| one.downcast_ref::<Answer>())
}

/// Whether an object does not exist.
pub(crate) fn is_missing(error: &object_store::Error) -> bool {
    answer_of(error)
        .is_some_and(|answer| answer.status == StatusCode::NOT_FOUND && !answer.lacks_bucket())
        || matches!(error, object_store::Error::NotFound { .. }) && answer_of(error).is_none()
}

/// Whether a range lies beyond the object.
pub(crate) fn is_beyond(error: &object_store::Error) -> bool {
    answer_of(error).is_some_and(|answer| answer.status == StatusCode::RANGE_NOT_SATISFIABLE)
}

/// How a request failed that got no answer.
fn kind_of(error: &object_store::Error) -> Option<HttpErrorKind> {
    if tls::Untrusted::of(error).is_some() || Refused::of(error).is_some() {
        return Some(HttpErrorKind::Connect);
    }
    let lost = chain(error).find_map(|one| one.downcast_ref::<Lost>());
    let failure = || chain(error).find_map(|one| one.downcast_ref::<HttpError>());
    lost.map(|lost| lost.0)
        .or_else(|| failure().map(HttpError::kind))
}

/// Whether a request without an answer may have reached the service.
pub(crate) fn is_sent(error: &object_store::Error) -> bool {
    kind_of(error).is_some_and(|kind| kind != HttpErrorKind::Connect)
}

pub(crate) fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&one| one.source())
}

/// The error of an object that is another one than the one that was opened.
pub(crate) fn replaced(address: &Address) -> Error {
    Error::damaged(format!("{address} was replaced while it was read"))
        .path(Path::new(&address.shown()))
        .hint("open it again; nothing that was read is mixed with the new content")
}

/// How often a request was tried, and for how long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tries {
    pub(crate) n: u64,
    pub(crate) seconds: f64,
}

impl Tries {
    /// Of a request that was tried more than once. `object_store` says it in the text of its error alone.
    fn of(error: &object_store::Error) -> Option<Self> {
        chain(error).find_map(|one| {
            let text = one.to_string();
            let mut words = text.strip_prefix("Error performing ")?.split(' ');
            // A method, a URL, and `in 61.2s, after 20 retries`.
            let place = words.position(|word| word == "in")?;
            let took = words.next()?.strip_suffix("s,")?;
            let (took, unit) = took.strip_suffix('m').map_or((took, 1.0), |ms| (ms, 1e-3));
            let seconds = took.parse::<f64>().ok()? * unit;
            let n = (place <= 2 && words.next() == Some("after")).then(|| words.next())??;
            (words.next() == Some("retries,")).then_some(())?;
            let n: u64 = n.parse().ok()?;
            Some(Self { n: n + 1, seconds })
        })
    }
}

impl fmt::Display for Tries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "; it was tried {} times in {:.1} s",
            self.n, self.seconds
        )
    }
}

/// An error of the core for a failed request.
pub(crate) fn explain(doing: Doing, address: &Address, error: &object_store::Error) -> Error {
    explain_tries(doing, address, error, Tries::of(error))
}

/// As [`explain`], of a request that was tried so often.
pub(crate) fn explain_tries(
    doing: Doing,
    address: &Address,
    error: &object_store::Error,
    tries: Option<Tries>,
) -> Error {
    let retried = tries.map_or_else(String::new, |tries| tries.to_string());
    let failed = |what: String| format!("{doing} {address}: {what}");
    let io = |what: String, errno: i32| Error::new(Kind::Io, failed(what)).errno(errno);
    let made = if let Some(answer) = answer_of(error) {
        of_answer(doing, address, answer, failed, &retried)
    } else if let Some(tls) = tls::Untrusted::of(error) {
        let (what, hint) = tls.explained(address.service);
        io(what, ECONNREFUSED).hint(hint)
    } else if let Some(refused) = Refused::of(error) {
        let (what, hint) = refused.explained(true);
        io(format!("{what}{retried}"), ECONNREFUSED).hint(hint)
    } else if is_without_ranges(error) {
        let message = format!("the server of {address} does not send ranges of a file");
        Error::new(Kind::Unsupported, message).hint("download the file")
    } else if let Some(name) = odd_name(error) {
        let name = Printable(name);
        io(
            format!("the service lists the name `{name}`, with an empty part, `.`, `..` or a control character"),
            ECOMM,
        )
        .hint("remove that object, or give it another name")
    } else if is_insecure(error) {
        let what = "the endpoint begins with http://, and requests without TLS are not allowed";
        io(what.to_owned(), EACCES)
            .hint("set AWS_ALLOW_HTTP=true, or `allow_http` of `BucketOptions`, if the network is trusted")
    } else if let Some(kind) = kind_of(error) {
        let cause = innermost(error);
        match kind {
            HttpErrorKind::Connect => io(
                format!("the service cannot be reached ({cause}){retried}"),
                ECONNREFUSED,
            )
            .hint(network_hint(address.service)),
            HttpErrorKind::Timeout => {
                io(format!("the service does not answer{retried}"), ETIMEDOUT)
                    .hint(network_hint(address.service))
            }
            _ => io(format!("the connection failed ({cause}){retried}"), ECOMM).hint("try again"),
        }
    } else {
        io(innermost(error), ECOMM).hint(credentials_hint(address.service))
    };
    made.path(Path::new(&address.shown()))
}

/// Whether a server has sent a whole file in place of a range.
fn is_without_ranges(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::NotSupported { .. })
        || chain(error)
            .any(|one| one.to_string() == "Received non-partial response when range requested")
}

/// A name in an answer that `object_store` refuses.
fn odd_name(error: &object_store::Error) -> Option<&str> {
    use object_store::path::Error::{BadSegment, EmptySegment};
    chain(error).find_map(|one| match one.downcast_ref()? {
        EmptySegment { path } | BadSegment { path, .. } => Some(&**path),
        _ => None,
    })
}

fn of_answer(
    doing: Doing,
    address: &Address,
    answer: &Answer,
    failed: impl Fn(String) -> String,
    retried: &str,
) -> Error {
    let io = |what: String, errno: i32| Error::new(Kind::Io, failed(what)).errno(errno);
    let (bucket, service) = (&address.bucket, address.service);
    match answer.status.as_u16() {
        412 if doing != Doing::Writing => replaced(address),
        416 => Error::damaged(failed("it is shorter than when it was opened".to_owned())),
        // Not as of a folder that does not exist: a run must not start anew because of a wrong name.
        404 if answer.code == "NoSuchUpload" => io(
            format!("the unfinished upload was removed meanwhile ({answer})"),
            ESTALE,
        )
        .hint("a rule of the bucket or another program ended it: write again"),
        404 if answer.lacks_bucket() => {
            io(format!("there is no bucket `{bucket}` ({answer})"), ECOMM)
                .hint(format!("check its name and {}", endpoint_hint(service)))
        }
        404 => Error::new(
            Kind::NotFound,
            format!("there is no object {address} ({answer})"),
        ),
        301 | 302 | 307 | 308 => wrong_region(&io, address, answer),
        400 if answer.code == "AuthorizationHeaderMalformed" => wrong_region(&io, address, answer),
        400 if matches!(
            &*answer.code,
            "InvalidPart" | "InvalidPartOrder" | "InvalidBlockList"
        ) =>
        {
            io(
                format!("the service does not have the parts that were sent ({answer})"),
                ESTALE,
            )
            .hint("another program has written the same object: write again")
        }
        400 if matches!(&*answer.code, "ExpiredToken" | "InvalidToken") => {
            io(format!("the credentials have expired ({answer})"), EACCES)
                .hint(credentials_hint(service))
        }
        // An answer to HEAD has no code.
        400 if answer.code.is_empty() && service == Service::S3 => io(
            format!("the service answered {answer}, as it does if credentials have expired"),
            EACCES,
        )
        .hint(credentials_hint(service)),
        _ if matches!(&*answer.code, "InvalidObjectState" | "BlobArchived") => io(
            format!("it is in an archive ({answer})"),
            EACCES,
        )
        .hint(
            "restore it first; `reshard inspect` names rules of the bucket that move objects there",
        ),
        401 | 403 => of_refusal(doing, service, answer, io),
        407 => {
            let (what, hint) = Refused::Unnamed.explained(false);
            io(what, ECONNREFUSED).hint(hint)
        }
        _ if answer.code == "RequestTimeout" => io(
            format!("the request did not arrive in time ({answer}){retried}"),
            EAGAIN,
        )
        .hint(network_hint(service)),
        429 | 503 => io(
            format!("the service asks for fewer requests ({answer}){retried}"),
            EAGAIN,
        )
        .hint("try again later, or from fewer hosts at once"),
        500..=599 => {
            io(format!("the service failed ({answer}){retried}"), EAGAIN).hint("try again later")
        }
        _ => io(format!("the service answered {answer}"), ECOMM),
    }
}

/// The error of a request that the credentials do not permit.
fn of_refusal(
    doing: Doing,
    service: Service,
    answer: &Answer,
    io: impl Fn(String, i32) -> Error,
) -> Error {
    let (what, hint) = match (answer.status.as_u16(), &*answer.code) {
        (401, _) => (
            "the service requires credentials",
            credentials_hint(service),
        ),
        (_, "RequestTimeTooSkewed") => (
            "the clock of this host is not that of the service",
            "set the clock of this host",
        ),
        (
            _,
            "InvalidAccessKeyId"
            | "SignatureDoesNotMatch"
            | "ExpiredToken"
            | "AuthenticationFailed",
        ) => (
            "the service does not accept the credentials",
            credentials_hint(service),
        ),
        _ => (
            "the credentials do not permit it",
            permissions_hint(doing, service),
        ),
    };
    io(format!("{what} ({answer})"), EACCES).hint(hint)
}

fn wrong_region(io: &impl Fn(String, i32) -> Error, address: &Address, answer: &Answer) -> Error {
    if address.service != Service::S3 {
        return io(
            format!("the service answered {answer}, a redirection"),
            ECOMM,
        );
    }
    let bucket = &address.bucket;
    match &answer.region {
        Some(region) => io(
            format!(
                "the bucket `{bucket}` is in the region `{}` ({answer})",
                Printable(region)
            ),
            ECOMM,
        )
        .hint(format!(
            "set AWS_REGION={}, or `region` of `BucketOptions`",
            Printable(region)
        )),
        None => io(
            format!("the bucket `{bucket}` is in another region ({answer})"),
            ECOMM,
        )
        .hint("set AWS_REGION, or `region` of `BucketOptions`, to the region of the bucket"),
    }
}

/// The cause without addresses of requests, which can hold a signature.
fn innermost(error: &(dyn StdError + 'static)) -> String {
    let last = chain(error)
        .last()
        .map(ToString::to_string)
        .unwrap_or_default();
    let shown = last
        .split_whitespace()
        .map(|word| if word.contains("://") { "..." } else { word });
    Printable(&shown.collect::<Vec<_>>().join(" ")).to_string()
}

fn is_insecure(error: &object_store::Error) -> bool {
    chain(error).any(|one| one.to_string().contains("URL scheme is not allowed"))
}

fn network_hint(service: Service) -> String {
    let proxy = proxy::variable().map_or_else(String::new, |name| {
        format!(", and the proxy that {name} names, which NO_PROXY takes out for hosts")
    });
    format!("check the network and {}{proxy}", endpoint_hint(service))
}

pub(crate) fn endpoint_hint(service: Service) -> &'static str {
    match service {
        Service::S3 => "AWS_ENDPOINT_URL, or `endpoint` of `BucketOptions`",
        Service::Google => "`endpoint` of `BucketOptions`",
        Service::Azure => "AZURE_STORAGE_ACCOUNT_NAME, or `endpoint` of `BucketOptions`",
        Service::Http => "the URL",
    }
}

fn credentials_hint(service: Service) -> &'static str {
    match service {
        Service::S3 => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), or AWS_PROFILE, or run where an \
             identity of the instance or the workload is given; `anonymous` of `BucketOptions` reads public buckets"
        }
        Service::Google => {
            "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`, or run where an identity \
             of the workload is given; `anonymous` of `BucketOptions` reads public buckets"
        }
        Service::Azure => {
            "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_KEY, or run where an \
             identity of the workload is given; `anonymous` of `BucketOptions` reads public containers"
        }
        Service::Http => "a signed URL may have expired: make a new one",
    }
}

fn permissions_hint(doing: Doing, service: Service) -> &'static str {
    let is_write = matches!(doing, Doing::Writing | Doing::Removing);
    match (service, is_write) {
        (Service::S3, false) => {
            "reading needs s3:GetObject and s3:ListBucket; see docs/guides/buckets.md"
        }
        (Service::S3, true) => {
            "writing needs s3:PutObject, s3:GetObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucket; see \
             docs/guides/buckets.md"
        }
        (Service::Google, false) => {
            "reading needs storage.objects.get and storage.objects.list; see docs/guides/buckets.md"
        }
        (Service::Google, true) => {
            "writing needs the role Storage Object User; see docs/guides/buckets.md"
        }
        (Service::Azure, false) => {
            "reading needs the role Storage Blob Data Reader; see docs/guides/buckets.md"
        }
        (Service::Azure, true) => {
            "writing needs the role Storage Blob Data Contributor; see docs/guides/buckets.md"
        }
        (Service::Http, _) => "a signed URL may have expired: make a new one",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, code: &str, region: Option<&str>) -> Answer {
        let body = format!("<Error><Code>{code}</Code></Error>");
        let mut response = http::Response::builder().status(status);
        if let Some(region) = region {
            response = response.header("x-amz-bucket-region", region);
        }
        Answer::new(&response.body(()).unwrap().into_parts().0, body.as_bytes())
    }

    /// The error of an answer, as `object_store` wraps it.
    fn error(answer: Answer) -> object_store::Error {
        object_store::Error::Generic {
            store: "test",
            source: Box::new(HttpError::new(HttpErrorKind::Unknown, answer)),
        }
    }

    #[test]
    fn what_a_refusal_of_a_new_object_means() {
        for (status, code, expected) in [
            (412, "PreconditionFailed", Refusal::Exists),
            (409, "BlobAlreadyExists", Refusal::Exists),
            (409, "ConditionalRequestConflict", Refusal::Busy),
            (429, "SlowDown", Refusal::Busy),
            (503, "SlowDown", Refusal::Unclear),
            (500, "InternalError", Refusal::Unclear),
            (408, "RequestTimeout", Refusal::Unclear),
            (400, "RequestTimeout", Refusal::Unclear),
            (400, "InvalidRequest", Refusal::Final),
            (403, "AccessDenied", Refusal::Final),
            (404, "NoSuchBucket", Refusal::Final),
        ] {
            assert_eq!(
                refusal_of(&answer(status, code, None)),
                expected,
                "{status} {code}"
            );
        }
    }

    #[test]
    fn errors_name_the_object_the_status_and_what_to_do() {
        let address = Address::parse("s3://b/a/c").unwrap();
        let of = |doing, one: Answer| explain(doing, &address, &error(one));
        let denied = of(Doing::Writing, answer(403, "AccessDenied", None));
        assert_eq!(
            denied.message(),
            "writing s3://b/a/c: the credentials do not permit it (403 AccessDenied)"
        );
        assert!(denied.facts().2.unwrap().contains("s3:PutObject"));
        assert!(
            of(Doing::Reading, answer(403, "AccessDenied", None))
                .facts()
                .2
                .unwrap()
                .contains("s3:GetObject")
        );
        let region = of(
            Doing::Writing,
            answer(301, "PermanentRedirect", Some("eu-west-7")),
        );
        assert!(region.facts().2.unwrap().contains("AWS_REGION=eu-west-7"));
        assert_eq!(
            of(Doing::Reading, answer(404, "NoSuchKey", None)).kind(),
            Kind::NotFound
        );
        assert_eq!(
            of(Doing::Reading, answer(404, "NoSuchBucket", None)).kind(),
            Kind::Io
        );
        assert_eq!(
            of(Doing::Reading, answer(412, "", None)).kind(),
            Kind::Damaged
        );
        let busy = of(Doing::Writing, answer(503, "SlowDown", None));
        assert!(busy.message().ends_with("(503 SlowDown)"));
        assert_eq!(busy.facts().3, Some(EAGAIN));
        let ended = of(Doing::Writing, answer(404, "NoSuchUpload", None));
        assert_eq!(ended.kind(), Kind::Io);
        let archived = of(Doing::Reading, answer(403, "InvalidObjectState", None));
        assert!(
            archived
                .message()
                .ends_with("it is in an archive (403 InvalidObjectState)")
        );
        assert!(archived.facts().2.unwrap().contains("restore"));
        // That of a HEAD.
        let expired = of(Doing::Looking, answer(400, "", None));
        assert!(expired.facts().2.unwrap().contains("AWS_SESSION_TOKEN"));
    }

    #[test]
    fn an_error_says_how_often_and_how_long_a_request_was_tried() {
        #[derive(Debug)]
        struct Text(&'static str);
        impl fmt::Display for Text {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.0)
            }
        }
        impl StdError for Text {}
        let of = |text| {
            let source = Box::new(Text(text));
            let store = "S3";
            Tries::of(&object_store::Error::Generic { store, source })
        };
        let end = "max_retries: 20, retry_timeout: 60s  - HTTP error: busy";
        let text = format!("Error performing PUT REDACTED in 8.43s, after 20 retries, {end}");
        let tries = of(text.leak()).unwrap();
        assert_eq!(tries.to_string(), "; it was tried 21 times in 8.4 s");
        let tries = of("Error performing GET http://a/b in 312.4ms, after 2 retries, ").unwrap();
        assert_eq!(tries.to_string(), "; it was tried 3 times in 0.3 s");
        for text in [
            "Error performing GET http://a/b in 12ms - in 3s, after 4 retries, ",
            "Error performing GET http://a/b in 3.2s - HTTP error",
            "in 3s, after 4 retries, ",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn a_code_is_a_plain_word() {
        assert_eq!(
            element("<Code>SlowDown</Code>", "Code").as_deref(),
            Some("SlowDown")
        );
        assert_eq!(element("<Code>a secret</Code>", "Code"), None);
        assert_eq!(element("<Code></Code>", "Code"), None);
    }
}
