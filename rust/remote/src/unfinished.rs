//! Uploads in parts that were begun and not completed: they cost money and are in no list of objects.

use crate::address::{Address, Service};
use crate::ask::{Findings, ask, reason_of};
use crate::client::{Client, runtime};
use crate::xml::Element;
use futures_util::future::join_all;
use reshard_core::Result;
use std::collections::BTreeSet;

const MAX_PAGES: usize = 10;
/// The sizes of the first ones are asked for.
const MAX_SIZES: usize = 20;

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

/// The unfinished uploads of an object and below a folder.
///
/// # Errors
/// The client cannot be made. If the service does not tell, that is a reason in the findings.
pub fn unfinished(address: &Address) -> Result<Findings<Unfinished>> {
    if address.service == Service::Http {
        return Ok(Findings::none("a server of files has no uploads"));
    }
    let client = Client::of(address)?;
    Ok(runtime()?.block_on(async {
        let mut listed = match address.service {
            Service::Azure => of_azure(&client, address).await,
            _ => of_parts(&client, address).await,
        };
        let sizes = listed
            .found
            .iter()
            .take(MAX_SIZES)
            .map(|one| n_bytes(&client, address.service, one));
        let sizes = join_all(sizes).await;
        for (one, n_bytes) in listed.found.iter_mut().zip(sizes) {
            one.n_bytes = n_bytes;
        }
        listed
    }))
}

fn is_below(address: &Address, key: &str) -> bool {
    let rest = key.strip_prefix(&address.key);
    rest.is_some_and(|rest| address.key.is_empty() || rest.is_empty() || rest.starts_with('/'))
}

async fn of_parts(client: &Client, address: &Address) -> Findings<Unfinished> {
    let permission = match address.service {
        Service::Google => "storage.multipartUploads.list",
        _ => "s3:ListBucketMultipartUploads",
    };
    let mut found = Vec::new();
    let mut markers = (String::new(), String::new());
    for _ in 0..MAX_PAGES {
        let mut query = vec![
            ("uploads", ""),
            ("prefix", &*address.key),
            ("encoding-type", "url"),
        ];
        if !markers.0.is_empty() {
            query.extend([
                ("key-marker", &*markers.0),
                ("upload-id-marker", &*markers.1),
            ]);
        }
        let page = match ask(client, "", &query).await {
            Ok(page) if page.name == "ListMultipartUploadsResult" => page,
            Ok(_) => {
                return Findings {
                    found,
                    reason: Some("the answer is no list of uploads".to_owned()),
                };
            }
            Err(error) => {
                return Findings {
                    found,
                    reason: Some(reason_of(address, &error, permission)),
                };
            }
        };
        let is_encoded = page.text_of("EncodingType") == "url";
        let decoded = |text: &str| {
            if is_encoded {
                decoded(text)
            } else {
                text.to_owned()
            }
        };
        found.extend(page.all("Upload").map(|one| Unfinished {
            key: decoded(one.text_of("Key")),
            id: one.text_of("UploadId").to_owned(),
            begun: one.text_of("Initiated").to_owned(),
            n_bytes: None,
        }));
        found.retain(|one| is_below(address, &one.key));
        let next = (
            decoded(page.text_of("NextKeyMarker")),
            page.text_of("NextUploadIdMarker").to_owned(),
        );
        // Each page must begin behind the last one.
        if page.text_of("IsTruncated") != "true" || next <= markers {
            return Findings {
                found,
                reason: None,
            };
        }
        markers = next;
    }
    let reason = Some(format!("there are more than {MAX_PAGES} pages of them"));
    Findings { found, reason }
}

/// A name in which a space is `+`, and other characters can be `%XX`.
fn decoded(text: &str) -> String {
    let pair = format!("k={text}").replace('&', "%26");
    let found = url::form_urlencoded::parse(pair.as_bytes()).next();
    found.map_or_else(String::new, |(_, value)| value.into_owned())
}

/// Azure lists blobs of which only blocks exist together with all others.
async fn of_azure(client: &Client, address: &Address) -> Findings<Unfinished> {
    let all = names_of_azure(client, address, &[("include", "uncommittedblobs")]).await;
    // Listed second: what is completed meanwhile is in this list.
    let complete = names_of_azure(client, address, &[]).await;
    match (all, complete) {
        (Ok(all), Ok(complete)) => Findings {
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
        (Err(reason), _) | (_, Err(reason)) => Findings::none(&reason),
    }
}

async fn names_of_azure(
    client: &Client,
    address: &Address,
    more: &[(&str, &str)],
) -> std::result::Result<BTreeSet<String>, String> {
    let mut names = BTreeSet::new();
    let mut marker = String::new();
    for _ in 0..MAX_PAGES {
        let mut query = vec![
            ("restype", "container"),
            ("comp", "list"),
            ("prefix", &*address.key),
        ];
        query.extend(more);
        if !marker.is_empty() {
            query.push(("marker", &*marker));
        }
        let page = ask(client, "", &query).await;
        let page =
            page.map_err(|error| reason_of(address, &error, "the role Storage Blob Data Reader"))?;
        let blobs = page
            .first("Blobs")
            .ok_or("the answer is no list of blobs")?;
        let found = blobs.all("Blob").map(|blob| blob.text_of("Name"));
        names.extend(
            found
                .filter(|name| is_below(address, name))
                .map(str::to_owned),
        );
        page.text_of("NextMarker").clone_into(&mut marker);
        if marker.is_empty() {
            return Ok(names);
        }
    }
    Err(format!(
        "the folder has more than {MAX_PAGES} pages of blobs"
    ))
}

fn sum(page: &Element, name: &str) -> Option<u64> {
    page.all(name).try_fold(0, |sum: u64, part| {
        sum.checked_add(part.text_of("Size").parse().ok()?)
    })
}

/// The bytes of the parts of an upload; `None` if the service does not tell.
async fn n_bytes(client: &Client, service: Service, one: &Unfinished) -> Option<u64> {
    if service == Service::Azure {
        let page = ask(
            client,
            &one.key,
            &[("comp", "blocklist"), ("blocklisttype", "uncommitted")],
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
        let page = ask(client, &one.key, &query).await.ok()?;
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

    #[test]
    fn uploads_of_a_neighbour_are_not_below() {
        let address = Address::parse("s3://b/run").unwrap();
        for (key, is_inside) in [
            ("run", true),
            ("run/a", true),
            ("run2/a", false),
            ("ru", false),
        ] {
            assert_eq!(is_below(&address, key), is_inside, "{key}");
        }
        assert!(is_below(&Address::parse("s3://b").unwrap(), "any"));
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
