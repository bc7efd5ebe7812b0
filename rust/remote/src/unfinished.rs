//! Uploads in parts that were begun and not completed: they cost money and are in no list of objects.

use crate::address::{Address, Service};
use crate::ask::{Findings, ask, reason_of};
use crate::client::{Client, runtime};
use crate::xml::Element;
use futures_util::future::join_all;
use reshard_core::Result;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// Pages of uploads, and of the parts of one.
const MAX_PAGES: usize = 10;
/// The sizes of the first ones are asked for.
const MAX_SIZES: usize = 20;
/// A blob has about 21 elements, and an answer a bound of them: a page has fewer than the 5,000 of the service.
const BLOBS_OF_PAGE: &str = "1000";
const MAX_PAGES_OF_BLOBS: usize = 50;

/// An unfinished upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// The name of the object in its bucket.
    pub key: String,
    /// Which upload of the object it is; empty for Azure, where an object has one.
    pub id: String,
    /// When it was begun, as the service says it; empty if it does not.
    pub begun: String,
    /// The bytes of its parts, if they are known.
    pub n_bytes: Option<u64>,
}

/// The unfinished uploads of an object, or below folders of one bucket.
///
/// # Arguments
/// `folders` are of one bucket. With `is_file`, they are objects. After `wait` no answer counts.
///
/// # Errors
/// The client cannot be made. If the service does not tell, that is a reason in the findings.
pub fn unfinished(
    folders: &[Address],
    is_file: bool,
    wait: Duration,
) -> Result<Findings<Unfinished>> {
    let Some(first) = folders.first() else {
        return Ok(Findings::none("no folder is named"));
    };
    if first.service == Service::Http {
        return Ok(Findings::none("a server of files has no uploads"));
    }
    let client = Client::of(first)?;
    Ok(runtime()?.block_on(async {
        let until = Instant::now() + wait;
        let mut listed = Findings {
            found: Vec::new(),
            reason: None,
        };
        for address in folders {
            let wanted = Wanted::of(address, is_file);
            let more = match address.service {
                Service::Azure => of_azure(&client, &wanted, until).await,
                _ => of_parts(&client, &wanted, until).await,
            };
            listed.found.extend(more.found);
            listed.reason = more.reason;
            if listed.reason.is_some() {
                break;
            }
        }
        let sizes = listed
            .found
            .iter()
            .take(MAX_SIZES)
            .map(|one| n_bytes(&client, first.service, one, until));
        let sizes = join_all(sizes).await;
        for (one, n_bytes) in listed.found.iter_mut().zip(sizes) {
            one.n_bytes = n_bytes;
        }
        listed
    }))
}

/// Which uploads are asked for.
struct Wanted<'a> {
    address: &'a Address,
    /// How the names of their objects begin: without a neighbour such as `run2`.
    prefix: String,
    is_file: bool,
}

impl<'a> Wanted<'a> {
    fn of(address: &'a Address, is_file: bool) -> Self {
        let prefix = match &*address.key {
            key if key.is_empty() || is_file => key.to_owned(),
            key => format!("{key}/"),
        };
        Self {
            address,
            prefix,
            is_file,
        }
    }

    fn has(&self, key: &str) -> bool {
        if self.is_file {
            key == self.prefix
        } else {
            key.starts_with(&self.prefix)
        }
    }

    /// Whether an object is behind all of them: lists are sorted by the names.
    fn ends_before(&self, key: &str) -> bool {
        self.is_file && *key > *self.prefix
    }
}

/// Where a page begins: behind an object, and behind one of its uploads.
type Markers = (String, String);

/// Where the next page begins; `None`: there is none. The uploads of an object are sorted by their time, not by their ID.
fn next_page(
    page: &Element,
    next: Markers,
    markers: &Markers,
) -> std::result::Result<Option<Markers>, String> {
    if page.text_of("IsTruncated") != "true" {
        Ok(None)
    } else if next.0.is_empty() || next == *markers {
        Err("the service says that there are more, and not where they begin".to_owned())
    } else {
        Ok(Some(next))
    }
}

async fn of_parts(client: &Client, wanted: &Wanted<'_>, until: Instant) -> Findings<Unfinished> {
    let mut found = Vec::new();
    let reason = add_parts(client, wanted, until, &mut found).await.err();
    Findings { found, reason }
}

/// Adds the uploads to those that were found; an error is the reason why these are not all.
async fn add_parts(
    client: &Client,
    wanted: &Wanted<'_>,
    until: Instant,
    found: &mut Vec<Unfinished>,
) -> std::result::Result<(), String> {
    let permission = match wanted.address.service {
        Service::Google => "storage.multipartUploads.list",
        _ => "s3:ListBucketMultipartUploads",
    };
    let mut markers = Markers::default();
    for _ in 0..MAX_PAGES {
        let mut query = vec![
            ("uploads", ""),
            ("prefix", &*wanted.prefix),
            ("encoding-type", "url"),
        ];
        if !markers.0.is_empty() {
            query.extend([
                ("key-marker", &*markers.0),
                ("upload-id-marker", &*markers.1),
            ]);
        }
        let page = ask(client, "", &query, until).await;
        let page = page.map_err(|error| reason_of(wanted.address, &error, permission))?;
        if page.name != "ListMultipartUploadsResult" {
            return Err("the answer is no list of uploads".to_owned());
        }
        let is_encoded = page.text_of("EncodingType") == "url";
        let decoded = |text: &str| {
            if is_encoded {
                decoded(text)
            } else {
                text.to_owned()
            }
        };
        let mut is_past = false;
        for one in page.all("Upload") {
            let key = decoded(one.text_of("Key"));
            is_past |= wanted.ends_before(&key);
            if wanted.has(&key) {
                found.push(Unfinished {
                    key,
                    id: one.text_of("UploadId").to_owned(),
                    begun: one.text_of("Initiated").to_owned(),
                    n_bytes: None,
                });
            }
        }
        let next = (
            decoded(page.text_of("NextKeyMarker")),
            page.text_of("NextUploadIdMarker").to_owned(),
        );
        if is_past {
            return Ok(());
        }
        match next_page(&page, next, &markers)? {
            None => return Ok(()),
            Some(next) => markers = next,
        }
    }
    Err(format!("there are more than {MAX_PAGES} pages of them"))
}

/// A name in which a space is `+`, and other characters can be `%XX`.
fn decoded(text: &str) -> String {
    let pair = format!("k={text}").replace('&', "%26");
    let found = url::form_urlencoded::parse(pair.as_bytes()).next();
    found.map_or_else(String::new, |(_, value)| value.into_owned())
}

/// Azure lists blobs of which only blocks exist together with all others.
async fn of_azure(client: &Client, wanted: &Wanted<'_>, until: Instant) -> Findings<Unfinished> {
    let all = names_of_azure(client, wanted, until, &[("include", "uncommittedblobs")]).await;
    let all = match all {
        Ok(all) => all,
        Err(reason) => return Findings::none(&reason),
    };
    // Listed second: what is completed meanwhile is in this list.
    match names_of_azure(client, wanted, until, &[]).await {
        Ok(complete) => Findings {
            found: all
                .difference(&complete)
                .map(|key| Unfinished {
                    key: key.clone(),
                    id: String::new(),
                    begun: String::new(),
                    n_bytes: None,
                })
                .collect(),
            reason: None,
        },
        Err(reason) => Findings::none(&reason),
    }
}

async fn names_of_azure(
    client: &Client,
    wanted: &Wanted<'_>,
    until: Instant,
    more: &[(&str, &str)],
) -> std::result::Result<BTreeSet<String>, String> {
    let mut names = BTreeSet::new();
    let mut marker = String::new();
    for _ in 0..MAX_PAGES_OF_BLOBS {
        let mut query = vec![
            ("restype", "container"),
            ("comp", "list"),
            ("prefix", &*wanted.prefix),
            ("maxresults", BLOBS_OF_PAGE),
        ];
        query.extend(more);
        if !marker.is_empty() {
            query.push(("marker", &*marker));
        }
        let page = ask(client, "", &query, until).await;
        let page = page.map_err(|error| {
            reason_of(wanted.address, &error, "the role Storage Blob Data Reader")
        })?;
        let blobs = page
            .first("Blobs")
            .ok_or("the answer is no list of blobs")?;
        let mut is_past = false;
        for name in blobs.all("Blob").map(|blob| blob.text_of("Name")) {
            is_past |= wanted.ends_before(name);
            if wanted.has(name) {
                names.insert(name.to_owned());
            }
        }
        let next = page.text_of("NextMarker");
        if next.is_empty() || is_past {
            return Ok(names);
        }
        if next == marker {
            return Err(
                "the service says that there are more, and not where they begin".to_owned(),
            );
        }
        next.clone_into(&mut marker);
    }
    Err(format!(
        "the folder has more than {MAX_PAGES_OF_BLOBS} pages of blobs"
    ))
}

fn sum(page: &Element, name: &str) -> Option<u64> {
    page.all(name).try_fold(0, |sum: u64, part| {
        sum.checked_add(part.text_of("Size").parse().ok()?)
    })
}

/// The bytes of the parts of an upload; `None` if the service does not tell.
async fn n_bytes(
    client: &Client,
    service: Service,
    one: &Unfinished,
    until: Instant,
) -> Option<u64> {
    if service == Service::Azure {
        let page = ask(
            client,
            &one.key,
            &[("comp", "blocklist"), ("blocklisttype", "uncommitted")],
            until,
        )
        .await
        .ok()?;
        let blocks = page.first("UncommittedBlocks")?;
        return sum(blocks, "Block");
    }
    let mut total = 0_u64;
    let mut marker = String::new();
    for _ in 0..MAX_PAGES {
        let mut query = vec![("uploadId", &*one.id)];
        if !marker.is_empty() {
            query.push(("part-number-marker", &*marker));
        }
        let page = ask(client, &one.key, &query, until).await.ok()?;
        total = total.checked_add(sum(&page, "Part")?)?;
        if page.text_of("IsTruncated") != "true" {
            return (page.name == "ListPartsResult").then_some(total);
        }
        page.text_of("NextPartNumberMarker").clone_into(&mut marker);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xml;

    #[test]
    fn uploads_of_a_neighbour_are_not_wanted() {
        let run = Address::parse("s3://b/run").unwrap();
        let (folder, file) = (Wanted::of(&run, false), Wanted::of(&run, true));
        for (key, is_below, is_it) in [
            ("run", false, true),
            ("run/a", true, false),
            ("run2/a", false, false),
            ("ru", false, false),
        ] {
            assert_eq!((folder.has(key), file.has(key)), (is_below, is_it), "{key}");
        }
        assert!(Wanted::of(&Address::parse("s3://b").unwrap(), false).has("any"));
        assert!(file.ends_before("run/a") && !file.ends_before("run"));
        assert!(!folder.ends_before("run2"));
    }

    #[test]
    fn a_list_ends_where_the_service_says_so() {
        let markers = |key: &str, id: &str| (key.to_owned(), id.to_owned());
        let more = xml::parse(b"<a><IsTruncated>true</IsTruncated></a>").unwrap();
        let last = xml::parse(b"<a><IsTruncated>false</IsTruncated></a>").unwrap();
        let before = markers("k", "9");
        assert_eq!(next_page(&last, Markers::default(), &before), Ok(None));
        // A later upload of the same object can have a smaller ID.
        let smaller = markers("k", "1");
        let next = next_page(&more, smaller.clone(), &before);
        assert_eq!(next, Ok(Some(smaller)));
        for stuck in [before.clone(), Markers::default()] {
            let reason = next_page(&more, stuck, &before).unwrap_err();
            assert!(reason.contains("not where they begin"), "{reason}");
        }
    }

    #[test]
    fn names_are_decoded() {
        for (text, expected) in [
            ("a%2Fb+c%26", "a/b c&"),
            ("a&b=c", "a&b=c"),
            ("", ""),
            ("%ff", "\u{fffd}"),
        ] {
            assert_eq!(decoded(text), expected);
        }
    }
}
