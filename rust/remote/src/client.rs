//! Clients of the services, and the runtime that they need: made when they are first used, and anew after a fork.
//!
//! The connections of a process must not be used by its child, and no thread of the runtime survives a fork. So each
//! process has an entry in a list, found by its number, which is never removed: to drop connections of the parent in a
//! child would take them from the parent, too.

use crate::address::{Address, Service};
use crate::ask::Door;
use crate::environment::Environment;
use crate::failure::{Doing, explain};
use crate::options::{Options, options_of, url_of};
use crate::pace::Pace;
use crate::service::Connector;
use crate::tls;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::{AzureConfigKey, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::client::ClientConfigKey;
use object_store::gcp::{
    GcpCredential, GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey,
};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, RetryConfig, StaticCredentialProvider,
};
use reshard_core::{Error, Kind, Result};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Without an answer or a byte for so long, a request is tried again.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(30);
pub(crate) const USER_AGENT: &str = concat!("reshard/", env!("CARGO_PKG_VERSION"));
const RETRY_FOR: Duration = Duration::from_secs(60);
const N_RUNTIME_THREADS: usize = 2;
/// Connections that are kept open for the next request.
const MAX_IDLE: &str = "64";
/// The account of emulators of Azure.
const EMULATED_ACCOUNT: &str = "devstoreaccount1";

/// What a client is made of.
#[derive(Clone, PartialEq, Eq)]
struct Spec {
    address: Address,
    options: Options,
    environment: Environment,
    /// With a signature, for HTTP.
    url: Option<String>,
}

/// The client of a bucket.
pub(crate) struct Client {
    spec: Spec,
    pid: u32,
    store: Store,
    /// None for a server of files.
    door: Option<Door>,
    pace: Arc<Pace>,
}

pub(crate) enum Store {
    S3(AmazonS3),
    Google(GoogleCloudStorage),
    Azure(MicrosoftAzure),
    Files(HttpStore),
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("address", &self.spec.address)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// The client of the bucket of an address, by what options and environment say now.
    pub(crate) fn of(address: &Address) -> Result<Arc<Self>> {
        let options = options_of(address);
        let needs_profile = address.service == Service::S3 && !options.anonymous;
        let spec = Spec {
            address: Address {
                key: String::new(),
                ..address.clone()
            },
            environment: Environment::of_process(needs_profile)?,
            url: url_of(address),
            options,
        };
        Process::this().client(&spec)
    }

    /// This client, or its like if this process is a child of the one that made it.
    pub(crate) fn here(self: &Arc<Self>) -> Result<Arc<Self>> {
        if self.pid == std::process::id() {
            return Ok(Arc::clone(self));
        }
        Process::this().client(&self.spec)
    }

    /// The objects.
    pub(crate) fn objects(&self) -> &dyn ObjectStore {
        match &self.store {
            Store::S3(store) => store,
            Store::Google(store) => store,
            Store::Azure(store) => store,
            Store::Files(store) => store,
        }
    }

    /// The lists of objects; a server of files has none.
    pub(crate) fn lists(&self) -> Option<&dyn PaginatedListStore> {
        match &self.store {
            Store::S3(store) => Some(store),
            Store::Google(store) => Some(store),
            Store::Azure(store) => Some(store),
            Store::Files(_) => None,
        }
    }

    /// Uploads in parts; a server of files takes none.
    pub(crate) fn parts(&self) -> Option<&dyn MultipartStore> {
        match &self.store {
            Store::S3(store) => Some(store),
            Store::Google(store) => Some(store),
            Store::Azure(store) => Some(store),
            Store::Files(_) => None,
        }
    }

    /// How the bucket is asked what `object_store` does not ask; a server of files cannot be.
    pub(crate) fn door(&self) -> Option<(&Store, &Door)> {
        Some((&self.store, self.door.as_ref()?))
    }

    /// How long its requests for ranges took.
    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// How long a request is tried again.
    pub(crate) fn retry_for(&self) -> Duration {
        self.spec.options.retry_for.unwrap_or(RETRY_FOR)
    }

    fn new(spec: &Spec) -> Result<Self> {
        // Only fails if another provider was installed first, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pace = Arc::default();
        let made = match spec.address.service {
            Service::S3 if has_tls(spec) => s3(spec, &pace, tls::trusted(&spec.environment)?),
            Service::S3 => s3(spec, &pace, ClientOptions::new()),
            Service::Google => google(spec, &pace),
            Service::Azure => azure(spec, &pace),
            Service::Http => files(spec, &pace).map(|store| (Store::Files(store), None)),
        };
        let (store, door) =
            made.map_err(|error| explain(Doing::Connecting, &spec.address, &error))?;
        Ok(Self {
            spec: spec.clone(),
            pid: std::process::id(),
            store,
            door,
            pace,
        })
    }
}

fn retry(spec: &Spec) -> RetryConfig {
    RetryConfig {
        // Pauses grow from one try to the next: with the default base, the random ones stay at a few hundred ms.
        backoff: BackoffConfig {
            base: 4.0,
            ..BackoffConfig::default()
        },
        max_retries: usize::MAX, // the time bounds them
        retry_timeout: spec.options.retry_for.unwrap_or(RETRY_FOR),
    }
}

/// Options of the connections. The whole of a body may take any time, each part of it may not.
pub(crate) fn connection_options() -> [(ClientConfigKey, String); 5] {
    [
        (ClientConfigKey::Timeout, "1 day".to_owned()),
        (
            ClientConfigKey::ReadTimeout,
            format!("{} s", READ_TIMEOUT.as_secs()),
        ),
        (
            ClientConfigKey::ConnectTimeout,
            format!("{} s", CONNECT_TIMEOUT.as_secs()),
        ),
        (ClientConfigKey::PoolMaxIdlePerHost, MAX_IDLE.to_owned()),
        (ClientConfigKey::UserAgent, USER_AGENT.to_owned()),
    ]
}

type Made = object_store::Result<(Store, Option<Door>)>;

/// Whether the service of a bucket in S3 is asked with TLS.
fn has_tls(spec: &Spec) -> bool {
    let of_environment = |key| spec.environment.get(key);
    let endpoint = spec.options.endpoint.as_deref();
    let endpoint = endpoint
        .or_else(|| of_environment("AWS_ENDPOINT_URL_S3"))
        .or_else(|| of_environment("AWS_ENDPOINT_URL"));
    !endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"))
}

fn s3(spec: &Spec, pace: &Arc<Pace>, mut connection: ClientOptions) -> Made {
    let mut builder = AmazonS3Builder::new().with_client_options(connection.clone());
    for (key, value) in spec.environment.with_prefix("AWS_") {
        // AWS_ENDPOINT_URL has a name of its own in `object_store`.
        if let Ok(key) = key.parse::<AmazonS3ConfigKey>() {
            if let AmazonS3ConfigKey::Client(key) = key {
                connection = connection.with_config(key, value);
            }
            builder = builder.with_config(key, value);
        }
    }
    for (key, value) in connection_options() {
        builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
    }
    let options = &spec.options;
    // The service compares a sum with what arrives, and keeps it. The variable is that of the SDKs.
    let sums = spec.environment.get("AWS_REQUEST_CHECKSUM_CALCULATION");
    let has_sums = !sums.is_some_and(|when| when.eq_ignore_ascii_case("when_required"));
    if has_sums && spec.environment.get("AWS_CHECKSUM_ALGORITHM").is_none() {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
        // TLS protects the bytes on their way: another sum, in the signature, would double the time.
        builder = builder.with_unsigned_payload(has_tls(spec));
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    if options.allow_http {
        builder = builder.with_config(
            AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp),
            "true",
        );
    }
    if options.anonymous {
        builder = builder.with_skip_signature(true);
    }
    let builder = builder
        .with_bucket_name(&spec.address.bucket)
        .with_retry(retry(spec));
    let is_set = |key| {
        let value = builder.get_config_value(&key);
        value.is_some_and(|value| value.eq_ignore_ascii_case("true"))
    };
    let allow_http = is_set(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
    let is_signed = !is_set(AmazonS3ConfigKey::SkipSignature);
    let connection = connection.with_allow_http(allow_http);
    let door = Door::new(String::new(), String::new(), connection, is_signed)?;
    let store = builder
        .with_http_connector(Connector::Cloud(Arc::clone(pace)))
        .build()?;
    Ok((Store::S3(store), Some(door)))
}

fn google(spec: &Spec, pace: &Arc<Pace>) -> Made {
    let mut builder = GoogleCloudStorageBuilder::new();
    let mut connection = ClientOptions::new();
    for (key, value) in spec.environment.with_prefix("GOOGLE_") {
        if let Ok(key) = key.parse::<GoogleConfigKey>() {
            if let GoogleConfigKey::Client(key) = key {
                connection = connection.with_config(key, value);
            }
            builder = builder.with_config(key, value);
        }
    }
    for (key, value) in connection_options() {
        builder = builder.with_config(GoogleConfigKey::Client(key), value);
    }
    let emulator = spec.environment.get("STORAGE_EMULATOR_HOST");
    let endpoint = spec.options.endpoint.as_deref().or(emulator);
    let is_http = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    let allow_http = spec.options.allow_http || emulator.is_some() && is_http;
    builder = builder.with_config(
        GoogleConfigKey::Client(ClientConfigKey::AllowHttp),
        allow_http.to_string(),
    );
    if let Some(endpoint) = endpoint {
        builder = builder.with_base_url(endpoint);
    }
    if spec.options.anonymous || emulator.is_some() {
        // Writes look for credentials all the same.
        let none = GcpCredential {
            bearer: String::new(),
        };
        builder = builder
            .with_skip_signature(true)
            .with_credentials(Arc::new(StaticCredentialProvider::new(none)));
    }
    let builder = builder
        .with_bucket_name(&spec.address.bucket)
        .with_retry(retry(spec));
    let base = endpoint.unwrap_or("https://storage.googleapis.com");
    let url = format!("{}/{}", base.trim_end_matches('/'), spec.address.bucket);
    let is_signed = !(spec.options.anonymous || emulator.is_some());
    let connection = connection.with_allow_http(allow_http);
    let door = Door::new(url, String::new(), connection, is_signed)?;
    let store = builder
        .with_http_connector(Connector::Cloud(Arc::clone(pace)))
        .build()?;
    Ok((Store::Google(store), Some(door)))
}

fn azure(spec: &Spec, pace: &Arc<Pace>) -> Made {
    let mut builder = MicrosoftAzureBuilder::new();
    let mut connection = ClientOptions::new();
    for (key, value) in spec.environment.with_prefix("AZURE_") {
        if let Ok(key) = key.parse::<AzureConfigKey>() {
            if let AzureConfigKey::Client(key) = key {
                connection = connection.with_config(key, value);
            }
            builder = builder.with_config(key, value);
        }
    }
    if let Some(endpoint) = spec.environment.get("IDENTITY_ENDPOINT") {
        builder = builder.with_msi_endpoint(endpoint);
    }
    for (key, value) in connection_options() {
        builder = builder.with_config(AzureConfigKey::Client(key), value);
    }
    if let Some(endpoint) = &spec.options.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    if spec.options.allow_http {
        builder = builder.with_allow_http(true);
    }
    if spec.options.anonymous {
        builder = builder.with_skip_signature(true);
    }
    let builder = builder
        .with_container_name(&spec.address.bucket)
        .with_retry(retry(spec));
    let value = |key| builder.get_config_value(&key).unwrap_or_default();
    let is_set = |key| value(key).eq_ignore_ascii_case("true");
    let is_emulator = is_set(AzureConfigKey::UseEmulator);
    let account = match value(AzureConfigKey::AccountName) {
        unnamed if unnamed.is_empty() && is_emulator => EMULATED_ACCOUNT.to_owned(),
        account => account,
    };
    let base = match value(AzureConfigKey::Endpoint) {
        _ if is_emulator => {
            let base = spec.environment.get("AZURITE_BLOB_STORAGE_URL");
            format!("{}/{account}", base.unwrap_or("http://127.0.0.1:10000"))
        }
        endpoint if endpoint.is_empty() => format!("https://{account}.blob.core.windows.net"),
        endpoint => endpoint,
    };
    let allow_http = is_emulator
        || spec.options.allow_http
        || is_set(AzureConfigKey::Client(ClientConfigKey::AllowHttp));
    let is_signed = !is_set(AzureConfigKey::SkipSignature);
    let url = format!("{}/{}", base.trim_end_matches('/'), spec.address.bucket);
    let connection = connection.with_allow_http(allow_http);
    let door = Door::new(url, account, connection, is_signed)?;
    let store = builder
        .with_http_connector(Connector::Cloud(Arc::clone(pace)))
        .build()?;
    Ok((Store::Azure(store), Some(door)))
}

fn files(spec: &Spec, pace: &Arc<Pace>) -> object_store::Result<HttpStore> {
    let url = spec.url.as_deref().unwrap_or(&spec.address.root);
    HttpBuilder::new()
        .with_url(url)
        .with_retry(retry(spec))
        .with_http_connector(Connector::Files(Arc::clone(pace)))
        .build()
}

/// The clients and the runtime of a process.
struct Process {
    pid: u32,
    runtime: OnceLock<Runtime>,
    /// None is removed, see above.
    clients: Mutex<Vec<Arc<Client>>>,
    next: OnceLock<Box<Process>>,
}

static FIRST: OnceLock<Box<Process>> = OnceLock::new();

impl Process {
    fn this() -> &'static Self {
        let pid = std::process::id();
        let mut slot = &FIRST;
        loop {
            if let Some(found) = slot.get() {
                if found.pid == pid {
                    return found;
                }
                slot = &found.next;
            } else {
                let new = Self {
                    pid,
                    runtime: OnceLock::new(),
                    clients: Mutex::default(),
                    next: OnceLock::new(),
                };
                // Another thread may have been first; then the loop finds its entry.
                let _ = slot.set(Box::new(new));
            }
        }
    }

    fn client(&self, spec: &Spec) -> Result<Arc<Client>> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = clients.iter().find(|client| client.spec == *spec) {
            return Ok(Arc::clone(found));
        }
        let _inside = runtime()?.enter();
        let made = Arc::new(Client::new(spec)?);
        clients.push(Arc::clone(&made));
        Ok(made)
    }
}

/// The runtime of this process.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    let process = Process::this();
    if let Some(runtime) = process.runtime.get() {
        return Ok(runtime);
    }
    let built = Builder::new_multi_thread()
        .worker_threads(N_RUNTIME_THREADS)
        .thread_name("reshard-remote")
        .enable_all()
        .build();
    let built = built.map_err(|error| {
        Error::new(
            Kind::Io,
            format!("cannot start threads for requests: {error}"),
        )
    })?;
    Ok(process.runtime.get_or_init(|| built))
}
