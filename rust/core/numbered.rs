//! Keys that differ only in the numbers of layers, experts and the like.
//!
//! A number is a component of a key between dots that has 1 to 18 decimal digits.

use std::collections::{HashMap, HashSet};

const MAX_DIGITS: usize = 18;

/// Keys with the same label that differ only in their numbers.
#[derive(Debug, PartialEq, Eq)]
pub struct Group {
    /// The position of the first of them among all keys.
    pub first: usize,
    /// How many they are.
    pub n_keys: usize,
    /// For each place of a number the distinct numbers at it, as they are written, in the order of the keys.
    pub numbers: Vec<Vec<String>>,
}

fn is_number(component: &str) -> bool {
    (1..=MAX_DIGITS).contains(&component.len())
        && component.bytes().all(|byte| byte.is_ascii_digit())
}

/// Groups of keys, in the order of their first key, and the number of the group of each key.
///
/// `labels` has one label for each key, or is empty: then all keys have the same.
pub fn groups<K: AsRef<str>>(keys: &[K], labels: &[u32]) -> (Vec<u32>, Vec<Group>) {
    let mut numbers_of: HashMap<(u32, String), u32> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    let mut seen: Vec<Vec<HashSet<&str>>> = Vec::new();
    let mut of_keys = Vec::with_capacity(keys.len());
    let (mut pattern, mut numbers) = (String::new(), Vec::new());
    for (i, key) in keys.iter().enumerate() {
        pattern.clear();
        numbers.clear();
        for component in key.as_ref().split('.') {
            if is_number(component) {
                numbers.push(component);
                pattern.push('n');
            } else {
                pattern.push('t');
                pattern.push_str(component);
            }
            pattern.push('.');
        }
        let id = (labels.get(i).copied().unwrap_or(0), pattern.clone());
        let next = groups.len() as u32;
        let number = *numbers_of.entry(id).or_insert(next);
        if number == next {
            groups.push(Group {
                first: i,
                n_keys: 0,
                numbers: vec![Vec::new(); numbers.len()],
            });
            seen.push(vec![HashSet::new(); numbers.len()]);
        }
        let (group, seen) = (&mut groups[number as usize], &mut seen[number as usize]);
        group.n_keys += 1;
        for ((number, texts), seen) in numbers.iter().zip(&mut group.numbers).zip(seen) {
            if seen.insert(number) {
                texts.push((*number).to_owned());
            }
        }
        of_keys.push(number);
    }
    (of_keys, groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_with_other_numbers_are_one_group() {
        let keys = [
            "layers.0.w",
            "layers.1.w",
            "b",
            "layers.01.w",
            "layers.0.w2",
            "1",
            "x.1234567890123456789",
        ];
        let (of_keys, found) = groups(&keys, &[]);
        assert_eq!(of_keys, [0, 0, 1, 0, 2, 3, 4]);
        assert_eq!(found[0].numbers, [["0", "1", "01"]]);
        assert_eq!((found[0].first, found[0].n_keys), (0, 3));
        assert_eq!(found[4].numbers, [[""; 0]; 0]);
    }

    #[test]
    fn labels_keep_keys_apart() {
        let (of_keys, found) = groups(&["l.0", "l.1", "l.2"], &[7, 8, 7]);
        assert_eq!(of_keys, [0, 1, 0]);
        assert_eq!(found[0].numbers, [["0", "2"]]);
    }
}
