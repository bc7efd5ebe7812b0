//! What the environment of the process says of credentials and endpoints, and profiles of AWS, which `object_store` does not
//! read.

use reshard_core::error::Printable;
use reshard_core::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Larger files are no profiles.
const MAX_PROFILE_BYTES: u64 = 1 << 20;

/// Variables of the environment that name credentials, endpoints or options, and a profile.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Environment(BTreeMap<String, String>);

impl Environment {
    /// Of this process. With `profiles`, a profile of AWS completes it.
    pub(crate) fn of_process(profiles: bool) -> Result<Self> {
        let prefixes = [
            "AWS_",
            "GOOGLE_",
            "AZURE_",
            "AZURITE_",
            "IDENTITY_",
            "MSI_",
            "STORAGE_EMULATOR_HOST",
        ];
        let found = std::env::vars_os()
            .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
        let mut this = Self(
            found
                .filter(|(key, value)| {
                    !value.is_empty() && prefixes.iter().any(|prefix| key.starts_with(prefix))
                })
                .collect(),
        );
        if profiles {
            let home = std::env::var_os("HOME").map(PathBuf::from);
            this.complete(home.as_deref())?;
        }
        Ok(this)
    }

    /// A variable.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Those with a prefix, in lower case, as `object_store` names its options.
    pub(crate) fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = (String, &str)> {
        let prefix = prefix.to_owned();
        self.0
            .iter()
            .filter(move |(key, _)| key.starts_with(&prefix))
            .map(|(key, value)| (key.to_ascii_lowercase(), value.as_str()))
    }

    /// Takes what is missing from a profile of AWS, unless the environment has credentials of another kind.
    fn complete(&mut self, home: Option<&Path>) -> Result<()> {
        let others = [
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
        ];
        let chosen = self.get("AWS_PROFILE").map(str::to_owned);
        let has_others = others.iter().any(|key| self.get(key).is_some());
        let name = chosen.clone().unwrap_or_else(|| "default".to_owned());
        let file = |key: &str, default: &str| match (self.get(key), home) {
            (Some(path), _) => Some(PathBuf::from(path)),
            (None, Some(home)) => Some(home.join(default)),
            (None, None) => None,
        };
        let mut found = BTreeMap::new();
        let config = file("AWS_CONFIG_FILE", ".aws/config");
        let shared = file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials");
        for (path, is_config) in [(config, true), (shared, false)] {
            let text = path.and_then(|path| read(&path)).unwrap_or_default();
            let section = if is_config && name != "default" {
                format!("profile {name}")
            } else {
                name.clone()
            };
            found.extend(section_of(&text, &section));
        }
        if let (Some(chosen), true) = (&chosen, found.is_empty() && !has_others) {
            let message = format!(
                "AWS_PROFILE is `{}`, and there is no such profile",
                Printable(chosen)
            );
            return Err(Error::new(Kind::Argument, message)
                .hint("`aws configure list-profiles` lists the profiles"));
        }
        let mut take = |from: &str, to: &str| {
            if let (Some(value), None) = (found.get(from), self.get(to)) {
                self.0.insert(to.to_owned(), value.clone());
            }
        };
        take("endpoint_url", "AWS_ENDPOINT_URL");
        take("region", "AWS_DEFAULT_REGION");
        if has_others {
            return Ok(());
        }
        if found.contains_key("aws_access_key_id") {
            take("aws_access_key_id", "AWS_ACCESS_KEY_ID");
            take("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY");
            take("aws_session_token", "AWS_SESSION_TOKEN");
            return Ok(());
        }
        let unsupported = [
            "sso_session",
            "sso_start_url",
            "role_arn",
            "credential_process",
        ];
        match unsupported.iter().find(|key| found.contains_key(**key)) {
            Some(key) => {
                let name = Printable(&name);
                let message = format!(
                    "the AWS profile `{name}` has `{key}`, which needs the AWS command line"
                );
                let command = format!(
                    "eval \"$(aws configure export-credentials --profile {name} --format env)\""
                );
                Err(Error::new(Kind::Unsupported, message).hint(format!("run `{command}` first")))
            }
            None => Ok(()),
        }
    }
}

fn read(path: &Path) -> Option<String> {
    let is_small = std::fs::metadata(path)
        .is_ok_and(|status| status.is_file() && status.len() <= MAX_PROFILE_BYTES);
    is_small
        .then(|| std::fs::read_to_string(path).ok())
        .flatten()
}

/// The keys of a section of an INI file as the AWS tools write it. Nested keys, which are indented, are left out.
fn section_of(text: &str, name: &str) -> BTreeMap<String, String> {
    let mut is_inside = false;
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if let Some(section) = trimmed
            .strip_prefix('[')
            .and_then(|rest| rest.split_once(']'))
        {
            is_inside = section.0.split_whitespace().collect::<Vec<_>>().join(" ") == name;
        } else if is_inside
            && !line.starts_with([' ', '\t', '#', ';'])
            && let Some((key, value)) = line.split_once('=')
        {
            let value = value.split(" #").next().unwrap_or_default();
            found.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    found
}
