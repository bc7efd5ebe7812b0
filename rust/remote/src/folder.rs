//! What is below a name in a bucket. A folder exists while there is an object whose name begins with its name and `/`.

use crate::address::{Address, Service};
use crate::client::Client;
use crate::failure::{Doing, explain, is_missing};
use crate::limit::answer_to;
use crate::object::{Object, key_of, options};
use crate::service::ForObject;
use object_store::list::PaginatedListOptions;
use object_store::{GetOptions, ObjectMeta};
use reshard_core::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// The most names that a page of a list can have.
const MAX_PAGE: usize = 1000;

/// What has a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// An object.
    Object {
        /// Its size.
        n_bytes: u64,
        /// What identifies its version.
        e_tag: Option<String>,
        /// When it was last changed, in seconds since 1970.
        modified: i64,
    },
    /// A folder.
    Folder,
}

impl Found {
    fn of(meta: &ObjectMeta) -> Self {
        Self::Object {
            n_bytes: meta.size,
            e_tag: meta.e_tag.clone(),
            modified: meta.last_modified.timestamp(),
        }
    }
}

/// What has a name; `None` if nothing does.
///
/// # Errors
/// The service cannot be asked, or there is no such bucket.
pub fn stat(address: &Address) -> Result<Option<Found>> {
    if address.service == Service::Http {
        return match Object::open(address) {
            Ok(object) => Ok(Some(Found::Object {
                n_bytes: object.n_bytes(),
                e_tag: object.e_tag().map(str::to_owned),
                modified: object.modified(),
            })),
            Err(error) if error.kind() == Kind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
    }
    let client = Client::of(address)?;
    let failed = |error: &object_store::Error| explain(Doing::Looking, address, error);
    if !address.key.is_empty() {
        let key = key_of(address)?;
        let head = GetOptions {
            head: true,
            ..options()
        };
        match answer_to(client.objects().get_opts(&key, head))? {
            Ok(found) => {
                return Ok(Some(Found::of(&found.meta)));
            }
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(failed(&error)),
        }
    }
    let is_there = first_page(&client, address, Some(1))?;
    Ok((is_there || address.key.is_empty()).then_some(Found::Folder))
}

/// Whether a list of objects below a name has any.
fn first_page(client: &Client, address: &Address, max_keys: Option<usize>) -> Result<bool> {
    let Some(lists) = client.lists() else {
        return Ok(false);
    };
    let prefix = prefix_of(address);
    let mut opts = PaginatedListOptions {
        max_keys,
        ..Default::default()
    };
    opts.extensions.insert(ForObject);
    let listed = answer_to(lists.list_paginated(prefix.as_deref(), opts))?;
    let listed = listed.map_err(|error| explain(Doing::Listing, address, &error))?;
    Ok(!listed.result.objects.is_empty())
}

fn prefix_of(address: &Address) -> Option<String> {
    (!address.key.is_empty()).then(|| format!("{}/", address.key))
}

/// The objects below a folder, at any depth, in the order of their names.
///
/// # Arguments
/// `after` is a name relative to the folder: only later ones are listed. At most `max_keys` are listed.
///
/// # Errors
/// The service cannot be asked, or has no lists. A folder without objects is none.
pub fn below(
    address: &Address,
    after: &str,
    max_keys: Option<usize>,
) -> Result<Vec<(String, Found)>> {
    let client = Client::of(address)?;
    let lists = client.lists().ok_or_else(|| no_lists(address))?;
    let prefix = prefix_of(address);
    let start = prefix.as_deref().unwrap_or_default();
    let mut found = BTreeMap::new();
    let mut page_token = None;
    let wanted = max_keys.unwrap_or(usize::MAX);
    while found.len() < wanted {
        let mut opts = PaginatedListOptions {
            offset: (!after.is_empty()).then(|| format!("{start}{after}")),
            max_keys: max_keys.map(|wanted| (wanted - found.len()).min(MAX_PAGE)),
            page_token,
            ..Default::default()
        };
        opts.extensions.insert(ForObject);
        let listed = answer_to(lists.list_paginated(prefix.as_deref(), opts))?;
        let listed = listed.map_err(|error| explain(Doing::Listing, address, &error))?;
        for object in listed.result.objects {
            let name = object.location.as_ref().strip_prefix(start);
            // A service can ignore where the list begins.
            if let Some(name) = name.filter(|name| !name.is_empty() && *name > after) {
                found.insert(name.to_owned(), Found::of(&object));
            }
        }
        page_token = listed.page_token;
        if page_token.is_none() {
            break;
        }
    }
    Ok(found.into_iter().take(wanted).collect())
}

fn no_lists(address: &Address) -> Error {
    let message = format!("the server of {address} does not list files");
    Error::new(Kind::Unsupported, message)
        .path(Path::new(&address.shown()))
        .hint("pass the URL of a file")
}

/// What is in a folder, by its name there, and whether that is all.
pub type Entries = (BTreeMap<String, Found>, bool);

/// What is in a folder. An object and a folder of one name are an object.
///
/// # Errors
/// [`Kind::NotFound`]: there is no such folder. [`Kind::Unsupported`]: a server of files has no lists.
pub fn entries(address: &Address, max_pages: usize) -> Result<Entries> {
    let client = Client::of(address)?;
    let lists = client.lists().ok_or_else(|| no_lists(address))?;
    let prefix = prefix_of(address);
    let start = prefix.as_deref().unwrap_or_default();
    let mut found = BTreeMap::new();
    let mut is_folder = address.key.is_empty();
    let mut page_token = None;
    for _ in 0..max_pages {
        let mut opts = PaginatedListOptions {
            delimiter: Some("/".into()),
            page_token,
            ..Default::default()
        };
        opts.extensions.insert(ForObject);
        let listed = answer_to(lists.list_paginated(prefix.as_deref(), opts))?;
        let listed = listed.map_err(|error| explain(Doing::Listing, address, &error))?;
        for folder in listed.result.common_prefixes {
            is_folder = true;
            if let Some(name) = folder.as_ref().strip_prefix(start) {
                let name = name.trim_end_matches('/').to_owned();
                found.entry(name).or_insert(Found::Folder);
            }
        }
        for object in listed.result.objects {
            is_folder = true;
            // The object that some programs make for a folder bears the name of the folder itself.
            let name = object.location.as_ref().strip_prefix(start);
            if let Some(name) = name.filter(|name| !name.is_empty()) {
                found.insert(name.to_owned(), Found::of(&object));
            }
        }
        page_token = listed.page_token;
        if page_token.is_none() {
            break;
        }
    }
    if is_folder {
        return Ok((found, page_token.is_none()));
    }
    let message = format!("there is no folder {address}");
    Err(Error::new(Kind::NotFound, message).path(Path::new(&address.shown())))
}
