//! Rules by which a bucket removes or moves objects by itself.

use crate::address::{Address, Service};
use crate::ask::{Findings, ask, reason_of};
use crate::client::{Client, runtime};
use crate::failure::answer_of;
use crate::xml::Element;
use reshard_core::Result;
use std::time::Duration;
use tokio::time::Instant;

/// What a rule does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Objects are removed.
    Expire,
    /// Objects go to a storage class.
    Move(String),
    /// Unfinished uploads are removed.
    EndUploads,
}

/// One action of a rule that is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Its name; empty without one.
    pub name: String,
    /// How the names of its objects begin.
    pub prefixes: Vec<String>,
    /// What it does.
    pub action: Action,
    /// After how many days, or from which day on.
    pub when: String,
    /// Whether more than the name of an object decides.
    pub is_narrower: bool,
}

type Parse = fn(&Element) -> Option<Vec<Rule>>;

/// The rules of a bucket about objects and uploads. Those about older versions of objects are left out. After `wait` no
/// answer counts.
///
/// # Errors
/// The client cannot be made. If the service does not tell, that is a reason in the findings.
pub fn rules(address: &Address, wait: Duration) -> Result<Findings<Rule>> {
    match address.service {
        Service::Http => return Ok(Findings::none("a server of files has none")),
        Service::Azure => {
            return Ok(Findings::none(
                "those of Azure belong to the account, and the credentials of a container do not show them",
            ));
        }
        Service::S3 | Service::Google => {}
    }
    let client = Client::of(address)?;
    let (permission, parse): (_, Parse) = match address.service {
        Service::S3 => ("s3:GetLifecycleConfiguration", of_s3),
        _ => ("storage.buckets.get", of_google),
    };
    let asked = runtime()?.block_on(async {
        let until = Instant::now() + wait;
        ask(&client, "", &[("lifecycle", "")], until).await
    });
    Ok(match asked {
        Ok(answer) => match parse(&answer) {
            Some(found) => Findings {
                found,
                reason: None,
            },
            None => Findings::none("the answer has another form than lists of rules have"),
        },
        Err(error)
            if answer_of(&error)
                .is_some_and(|answer| answer.is_code("NoSuchLifecycleConfiguration")) =>
        {
            Findings {
                found: Vec::new(),
                reason: None,
            }
        }
        Err(error) => Findings::none(&reason_of(address, &error, permission)),
    })
}

fn when(rule: &Element, days: &str, date: &str) -> String {
    match (rule.text_of(days), rule.text_of(date)) {
        ("", "") => String::new(),
        ("", date) => format!("from {date} on"),
        (days, _) => format!("after {days} days"),
    }
}

fn of_s3(answer: &Element) -> Option<Vec<Rule>> {
    if answer.name != "LifecycleConfiguration" {
        return None;
    }
    let mut rules = Vec::new();
    for rule in answer.all("Rule") {
        match rule.text_of("Status") {
            "Enabled" => {}
            // Those of another service, such as of Google behind this interface, are always in force.
            "" => return None,
            _ => continue,
        }
        let filter = rule.first("Filter");
        let within = filter.and_then(|filter| filter.first("And")).or(filter);
        let prefix =
            within.map_or_else(|| rule.text_of("Prefix"), |within| within.text_of("Prefix"));
        let is_narrower =
            within.is_some_and(|within| within.inside.iter().any(|one| one.name != "Prefix"));
        let mut add = |action, when| {
            rules.push(Rule {
                name: rule.text_of("ID").to_owned(),
                prefixes: vec![prefix.to_owned()],
                action,
                when,
                is_narrower,
            });
        };
        for one in rule.all("Expiration") {
            // The other kind of expiration removes marks of removed objects.
            let when = when(one, "Days", "Date");
            if !when.is_empty() {
                add(Action::Expire, when);
            }
        }
        for one in rule.all("Transition") {
            add(
                Action::Move(one.text_of("StorageClass").to_owned()),
                when(one, "Days", "Date"),
            );
        }
        for one in rule.all("AbortIncompleteMultipartUpload") {
            add(Action::EndUploads, when(one, "DaysAfterInitiation", ""));
        }
    }
    Some(rules)
}

fn of_google(answer: &Element) -> Option<Vec<Rule>> {
    if answer.name != "LifecycleConfiguration" {
        return None;
    }
    let empty = Element::default();
    let mut rules = Vec::new();
    for rule in answer.all("Rule") {
        let condition = rule.first("Condition").unwrap_or(&empty);
        let is_of_older_versions = [
            "NumberOfNewerVersions",
            "DaysSinceNoncurrentTime",
            "NoncurrentTimeBefore",
        ]
        .iter()
        .any(|name| condition.first(name).is_some())
            || condition.text_of("IsLive") == "false";
        let Some(action) = rule.first("Action") else {
            continue;
        };
        let action = if action.first("Delete").is_some() {
            Action::Expire
        } else if action.first("SetStorageClass").is_some() {
            Action::Move(action.text_of("SetStorageClass").to_owned())
        } else if action.first("AbortIncompleteMultipartUpload").is_some() {
            Action::EndUploads
        } else {
            continue;
        };
        if is_of_older_versions {
            continue;
        }
        let mut prefixes: Vec<_> = condition
            .all("MatchesPrefix")
            .map(|one| one.text.clone())
            .collect();
        if prefixes.is_empty() {
            prefixes.push(String::new());
        }
        let plain = ["MatchesPrefix", "Age", "CreatedBefore", "IsLive"];
        rules.push(Rule {
            name: String::new(),
            prefixes,
            action,
            when: when(condition, "Age", "CreatedBefore"),
            is_narrower: condition
                .inside
                .iter()
                .any(|one| !plain.contains(&&*one.name)),
        });
    }
    Some(rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xml::parse;

    fn shown(rules: Option<Vec<Rule>>) -> Vec<String> {
        let rules = rules.unwrap().into_iter();
        rules
            .map(|one| {
                format!(
                    "{:?} {:?} {} {}",
                    one.action, one.prefixes, one.when, one.is_narrower
                )
            })
            .collect()
    }

    #[test]
    fn rules_of_s3_about_objects_and_uploads() {
        let text = "<LifecycleConfiguration>
            <Rule><Status>Enabled</Status><Prefix>old/</Prefix><Expiration><Days>3</Days></Expiration></Rule>
            <Rule><Status>Disabled</Status><Filter/><Expiration><Days>3</Days></Expiration></Rule>
            <Rule><Status>Enabled</Status><Filter><And><Prefix>a/</Prefix><Tag/></And></Filter>
              <Transition><Date>2030-01-01</Date><StorageClass>GLACIER</StorageClass></Transition></Rule>
            <Rule><Status>Enabled</Status><Filter/>
              <Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>
              <NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>
              <AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation>
              </AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>";
        let expected = [
            "Expire [\"old/\"] after 3 days false",
            "Move(\"GLACIER\") [\"a/\"] from 2030-01-01 on true",
            "EndUploads [\"\"] after 7 days false",
        ];
        assert_eq!(shown(of_s3(&parse(text.as_bytes()).unwrap())), expected);
        let of_google = b"<LifecycleConfiguration><Rule><Action><Delete/></Action></Rule></LifecycleConfiguration>";
        for other in [&b"<Other/>"[..], of_google] {
            assert_eq!(of_s3(&parse(other).unwrap()), None);
        }
    }

    #[test]
    fn rules_of_google_about_objects_and_uploads() {
        let text = "<LifecycleConfiguration>
            <Rule><Action><Delete/></Action><Condition><Age>30</Age><MatchesPrefix>a/</MatchesPrefix>
              <MatchesPrefix>b/</MatchesPrefix></Condition></Rule>
            <Rule><Action><Delete/></Action><Condition><NumberOfNewerVersions>3</NumberOfNewerVersions></Condition></Rule>
            <Rule><Action><Delete/></Action><Condition><IsLive>false</IsLive></Condition></Rule>
            <Rule><Action><SetStorageClass>ARCHIVE</SetStorageClass></Action>
              <Condition><Age>9</Age><MatchesSuffix>.x</MatchesSuffix></Condition></Rule>
            <Rule><Action><AbortIncompleteMultipartUpload/></Action><Condition><Age>2</Age></Condition></Rule>
            </LifecycleConfiguration>";
        let expected = [
            "Expire [\"a/\", \"b/\"] after 30 days false",
            "Move(\"ARCHIVE\") [\"\"] after 9 days true",
            "EndUploads [\"\"] after 2 days false",
        ];
        assert_eq!(shown(of_google(&parse(text.as_bytes()).unwrap())), expected);
    }
}
