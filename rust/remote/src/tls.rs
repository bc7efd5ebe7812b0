//! TLS: which certificates are trusted, and failures that another try does not mend.

use crate::address::Service;
use crate::environment::Environment;
use crate::failure::{chain, endpoint_hint};
use http::Uri;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::{Certificate, ClientOptions};
use reshard_core::error::Printable;
use reshard_core::{Error, Kind, Result};
use rustls::{CertificateError, InvalidMessage};
use std::error::Error as StdError;
use std::fmt;

/// The variable of the SDKs of AWS.
const OF_AWS: &str = "AWS_CA_BUNDLE";

/// Options of connections that trust what `AWS_CA_BUNDLE` names, besides the certificates of the system.
pub(crate) fn trusted(environment: &Environment) -> Result<ClientOptions> {
    let Some(path) = environment.get(OF_AWS) else {
        return Ok(ClientOptions::new());
    };
    let failed = |what: &str| {
        let message = format!("{OF_AWS} names `{}`, {what}", Printable(path));
        Error::new(Kind::Argument, message)
            .hint("name a file with the certificates of authorities in PEM, or unset the variable")
    };
    let content =
        std::fs::read(path).map_err(|error| failed(&format!("which cannot be read: {error}")))?;
    let found = Certificate::from_pem_bundle(&content).unwrap_or_default();
    if found.is_empty() {
        return Err(failed("which has no certificate"));
    }
    let options = found.into_iter().fold(ClientOptions::new(), |all, one| {
        all.with_root_certificate(one)
    });
    Ok(options)
}

/// A host, and its port if it is not the one of the scheme.
pub(crate) fn host_of(uri: &Uri) -> String {
    let host = uri.host().unwrap_or_default();
    let port = uri.port_u16().map(|port| format!(":{port}"));
    format!("{host}{}", port.unwrap_or_default())
}

/// No connection was made, because of a certificate, or because the host does not speak TLS.
#[derive(Debug)]
pub(crate) struct Untrusted {
    host: String,
    cause: rustls::Error,
}

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.host, self.cause)
    }
}

impl StdError for Untrusted {}

/// A failure as it was, or as one that is not tried again.
pub(crate) fn once_if_untrusted(error: HttpError, host: &str) -> HttpError {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(&error);
    while let Some(one) = cause {
        if let Some(
            cause @ (rustls::Error::InvalidCertificate(_)
            | rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)),
        ) = one.downcast_ref::<rustls::Error>()
        {
            let (host, cause) = (host.to_owned(), cause.clone());
            // `Unknown` is not tried again.
            return HttpError::new(HttpErrorKind::Unknown, Untrusted { host, cause });
        }
        // The source of an error of the system is that of the error in it.
        let inner = one.downcast_ref::<std::io::Error>();
        let inner = inner.and_then(std::io::Error::get_ref);
        cause = inner.map(|inner| inner as _).or_else(|| one.source());
    }
    error
}

impl Untrusted {
    /// That of an error of `object_store`.
    pub(crate) fn of(error: &object_store::Error) -> Option<&Self> {
        chain(error).find_map(|one| one.downcast_ref())
    }

    /// What is wrong, and what to do.
    pub(crate) fn explained(&self, service: Service) -> (String, String) {
        let host = Printable(&self.host);
        let cause = self.cause.to_string();
        let cause = Printable(&cause);
        let endpoint = endpoint_hint(service);
        match &self.cause {
            rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => (
                format!(
                    "the certificate of {host} is signed by an authority that is not trusted here ({cause})"
                ),
                authority_hint(service),
            ),
            rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => (
                format!("the certificate of {host} is for another name ({cause})"),
                format!("write a name of the certificate in {endpoint}"),
            ),
            rustls::Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => (
                format!("the certificate of {host} is not valid now ({cause})"),
                "check the clock of this host; else the service has to renew its certificate"
                    .to_owned(),
            ),
            rustls::Error::InvalidCertificate(_) => (
                format!("the certificate of {host} is not accepted ({cause})"),
                format!("check {endpoint}; else the service needs another certificate"),
            ),
            _ => (
                format!("{host} does not answer with TLS ({cause})"),
                format!(
                    "check {endpoint}: a service without TLS needs http:// there, and `allow_http`"
                ),
            ),
        }
    }
}

fn authority_hint(service: Service) -> String {
    let set = std::env::var("SSL_CERT_FILE")
        .ok()
        .filter(|path| !path.is_empty());
    let here = match set {
        Some(path) => format!("SSL_CERT_FILE is `{}`: let it name", Printable(&path)),
        None => "set SSL_CERT_FILE to".to_owned(),
    };
    let of_aws = match service {
        Service::S3 => format!("; or {OF_AWS}, which is trusted besides them"),
        _ => String::new(),
    };
    format!(
        "{here} a file with the certificate of that authority in PEM, which is trusted instead of those of the system{of_aws}"
    )
}
