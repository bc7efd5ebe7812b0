//! Objects that are written as a whole by one request, created if they do not exist, and removed.

use crate::address::{Address, Service};
use crate::client::{Client, runtime};
use crate::failure::{
    Doing, Refusal, Tries, answer_of, explain, explain_tries, is_missing, is_sent, refusal_of,
};
use crate::limit::answer_to;
use crate::object::key_of;
use crate::service::{ForObject, Once};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::{PutMode, PutOptions};
use reshard_core::{Error, Kind, Result};
use std::path::Path;
use std::time::{Duration, Instant};

/// The first pause before a request is sent again that was refused; each one is twice as long, up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(4);

/// What became of an object that had to be new.
#[derive(Debug)]
pub enum PutNew {
    /// It was created, by this request.
    Created,
    /// It existed: this request has changed nothing.
    Exists,
    /// The answer was lost, or says of a failure of the service: the object may have been created. A reader of it knows.
    Unknown(Error),
}

/// Refuses to write behind HTTP.
pub(crate) fn check_writable(address: &Address) -> Result<()> {
    if address.service != Service::Http {
        return Ok(());
    }
    let message = format!("{address} is behind HTTP, which is only read");
    Err(Error::new(Kind::Unsupported, message)
        .path(Path::new(&address.shown()))
        .hint("write into a folder or a bucket (s3://, gs://, az://)"))
}

/// Writes an object, in place of an older one. A reader sees the old content or the new one.
///
/// # Errors
/// [`Kind::Io`]: the service did not confirm it; the object is the old one or the new one.
pub fn put(address: &Address, content: Vec<u8>) -> Result<()> {
    check_writable(address)?;
    let client = Client::of(address)?;
    let key = key_of(address)?;
    let mut options = PutOptions::default();
    options.extensions.insert(ForObject);
    let sent = client.objects().put_opts(&key, content.into(), options);
    answer_to(sent)?.map_err(|error| explain(Doing::Writing, address, &error))?;
    Ok(())
}

/// Creates an object that must not exist: of several writers one succeeds. A request whose answer is lost is not sent
/// again, so that the outcome never belongs to another request.
///
/// # Errors
/// [`Kind::Io`]: the service refused it; nothing was created.
pub fn put_new(address: &Address, content: Vec<u8>) -> Result<PutNew> {
    check_writable(address)?;
    let client = Client::of(address)?;
    let key = key_of(address)?;
    let content = Bytes::from(content);
    let begun = Instant::now();
    let end = begun + client.retry_for();
    let mut n_tries = 0;
    let mut pause = FIRST_PAUSE;
    runtime()?.block_on(async {
        loop {
            let mut options = PutOptions::from(PutMode::Create);
            options.extensions.insert(ForObject);
            options.extensions.insert(Once);
            let sent = client
                .objects()
                .put_opts(&key, content.clone().into(), options);
            let Err(error) = sent.await else {
                return Ok(PutNew::Created);
            };
            n_tries += 1;
            let tries = (n_tries > 1).then(|| Tries {
                n: n_tries,
                seconds: begun.elapsed().as_secs_f64(),
            });
            let explained = || explain_tries(Doing::Writing, address, &error, tries);
            match answer_of(&error).map(refusal_of) {
                Some(Refusal::Exists) => return Ok(PutNew::Exists),
                // An answer that says that nothing was written.
                Some(Refusal::Busy) if Instant::now() + pause < end => {}
                Some(Refusal::Busy | Refusal::Final) => return Err(explained()),
                None if !is_sent(&error) => return Err(explained()),
                Some(Refusal::Unclear) | None => return Ok(PutNew::Unknown(explained())),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    })
}

/// Removes objects of one bucket, several at once; no error for those that do not exist.
///
/// # Errors
/// [`Kind::Io`]: the service did not confirm it for one of them, which the error names.
pub fn remove(addresses: &[Address]) -> Result<()> {
    let Some(first) = addresses.first() else {
        return Ok(());
    };
    check_writable(first)?;
    let client = Client::of(first)?;
    let keys = addresses.iter().map(|address| {
        if address.root == first.root {
            return key_of(address);
        }
        let message = format!("{first} and {address} are in different buckets");
        Err(Error::new(Kind::Argument, message))
    });
    let keys = keys.collect::<Result<Vec<_>>>()?;
    let keys = stream::iter(keys.into_iter().map(Ok)).boxed();
    // The results are in the order of the names.
    let results = client.objects().delete_stream(keys).collect::<Vec<_>>();
    let results = answer_to(async { Ok(results.await) })?;
    let results = results.map_err(|error| explain(Doing::Removing, first, &error))?;
    for (number, result) in results.into_iter().enumerate() {
        match result {
            Err(error) if !is_missing(&error) => {
                let address = addresses.get(number).unwrap_or(first);
                return Err(explain(Doing::Removing, address, &error));
            }
            _ => {}
        }
    }
    Ok(())
}
