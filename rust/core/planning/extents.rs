//! The plan of requests for remote sources: which ranges are fetched, in which order.
//!
//! A request takes about as long as some MiB of a transfer. So the bytes that are wanted are widened to complete chunks
//! where those are verified, ranges with small gaps between them become one, and long ranges are cut so that several
//! requests share a connection's speed. This module only computes; `read::window` fetches.
//!
//! ```text
//! wanted bytes of each band -> chunks -> one range where a gap is below `gap_bytes` -> parts of `request_bytes`
//! ```

use crate::files::checksum::CHUNK_BYTES;
use crate::files::source::Link;
use std::collections::BTreeMap;

/// How requests are planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Gaps of fewer bytes are fetched: that takes less time than another request.
    pub gap_bytes: u64,
    /// The most bytes of a request, a multiple of a chunk.
    pub request_bytes: u64,
}

/// Smaller requests take more of the processor for a byte.
const MIN_REQUEST_BYTES: u64 = 2 << 20;
/// Larger ones are not faster.
const MAX_REQUEST_BYTES: u64 = 8 << 20;

impl Rules {
    /// The rules for a plan of so many bytes. If they are few, all requests at once have a part of them, so that they end at
    /// about the same time. Sizes are powers of two: requests of several plans end at the same places, so that caches of
    /// a service serve them.
    pub fn of(link: Link, n_bytes: u64) -> Self {
        let each = n_bytes / link.n_at_once.max(1) as u64;
        let request_bytes = each.max(link.gap_bytes).min(MAX_REQUEST_BYTES);
        Self {
            gap_bytes: link.gap_bytes,
            request_bytes: request_bytes.next_power_of_two().max(MIN_REQUEST_BYTES),
        }
    }
}

/// A range of a source that a part of the work needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The number of the source.
    pub source: u32,
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// The number of the part of the work. Parts are done about in their order.
    pub part: usize,
    /// Whether it is fetched into its destination, and not kept until the part is done.
    pub is_direct: bool,
}

/// A range of a source that one request fetches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// The number of the source.
    pub source: u32,
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// The first part of the work that needs it.
    pub first_part: usize,
    /// What is kept of it: ranges apart from each other, in their order. The rest is fetched into its destination, or lies
    /// in a gap.
    pub kept: Vec<(u64, u64)>,
}

impl Extent {
    /// How many bytes.
    pub fn n_bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// The requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Extents {
    /// In the order in which they are fetched: that of the parts of the work that need them first.
    pub in_order: Vec<Extent>,
    /// For each part of the work the numbers of its extents, sorted.
    pub of_parts: Vec<Vec<u32>>,
}

/// First byte and end of what a part of the work wants, the part, and whether it is direct.
type Range = (u64, u64, usize, bool);

/// Plans the requests of a number of parts of work.
///
/// `size_of` returns the size of a source in bytes, and whether complete chunks of it are verified.
pub fn plan(
    wanted: &[Wanted],
    n_parts: usize,
    rules: Rules,
    size_of: impl Fn(u32) -> (u64, bool),
) -> Extents {
    let mut of_sources: BTreeMap<u32, Vec<Range>> = BTreeMap::new();
    for one in wanted.iter().filter(|one| one.start < one.end) {
        let (n_bytes, in_chunks) = size_of(one.source);
        let (mut start, mut end) = (one.start, one.end.min(n_bytes));
        if in_chunks {
            let chunk = CHUNK_BYTES as u64;
            (start, end) = (
                start / chunk * chunk,
                end.next_multiple_of(chunk).min(n_bytes),
            );
        }
        of_sources
            .entry(one.source)
            .or_default()
            .push((start, end, one.part, one.is_direct));
    }
    let mut found = Vec::new(); // each extent with the parts that need it
    for (source, mut ranges) in of_sources {
        ranges.sort_unstable();
        let mut from = 0;
        while from < ranges.len() {
            let (start, mut end, ..) = ranges[from];
            let mut until = from + 1;
            while until < ranges.len()
                && ranges[until].0 <= end.saturating_add(rules.gap_bytes.saturating_sub(1))
            {
                end = end.max(ranges[until].1);
                until += 1;
            }
            cut(
                source,
                (start, end),
                &ranges[from..until],
                rules,
                &mut found,
            );
            from = until;
        }
    }
    found.sort_by_key(|(extent, _)| (extent.first_part, extent.source, extent.start));
    let mut of_parts = vec![Vec::new(); n_parts];
    for (number, (_, parts)) in found.iter().enumerate() {
        for &part in parts {
            of_parts[part].push(number as u32);
        }
    }
    Extents {
        in_order: found.into_iter().map(|(extent, _)| extent).collect(),
        of_parts,
    }
}

/// Cuts a range at multiples of the size of a request, so that chunks stay complete. A part in which nothing is wanted is
/// left out.
fn cut(
    source: u32,
    (start, end): (u64, u64),
    ranges: &[Range],
    rules: Rules,
    found: &mut Vec<(Extent, Vec<usize>)>,
) {
    let request = rules.request_bytes.max(1);
    // The ranges are sorted by their start: those that reach into a piece begin before its end.
    let mut active: Vec<Range> = Vec::new();
    let mut next = 0;
    let mut at = start;
    while at < end {
        let until = ((at / request + 1) * request).min(end);
        active.retain(|range| range.1 > at);
        while next < ranges.len() && ranges[next].0 < until {
            active.push(ranges[next]);
            next += 1;
        }
        // Both ends of a piece that nobody wants are not fetched.
        let first = active.iter().map(|range| range.0.max(at)).min();
        let last = active.iter().map(|range| range.1.min(until)).max();
        if let (Some(first), Some(last)) = (first, last) {
            let mut parts: Vec<usize> = active.iter().map(|range| range.2).collect();
            parts.sort_unstable();
            parts.dedup();
            let mut kept: Vec<(u64, u64)> = Vec::new();
            for range in active.iter().filter(|range| !range.3) {
                let (from, to) = (range.0.max(at), range.1.min(until));
                match kept.last_mut() {
                    Some(last) if from <= last.1 => last.1 = last.1.max(to),
                    _ => kept.push((from, to)),
                }
            }
            let extent = Extent {
                source,
                start: first,
                end: last,
                first_part: parts[0],
                kept,
            };
            found.push((extent, parts));
        }
        at = until;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u64 = CHUNK_BYTES as u64;

    fn check(wanted: &[Wanted], n_parts: usize, rules: Rules, sizes: &[u64], in_chunks: bool) {
        let size_of = |source: u32| (sizes[source as usize], in_chunks);
        let planned = plan(wanted, n_parts, rules, size_of);
        let extents = &planned.in_order;
        let widened = |one: &Wanted| {
            if in_chunks {
                let end = one.end.next_multiple_of(CHUNK);
                (
                    one.start / CHUNK * CHUNK,
                    end.min(sizes[one.source as usize]),
                )
            } else {
                (one.start, one.end)
            }
        };
        // Every wanted byte is in extents of its part.
        for one in wanted {
            let mut at = one.start;
            let mut own: Vec<&Extent> = planned.of_parts[one.part]
                .iter()
                .map(|&i| &extents[i as usize])
                .collect();
            own.sort_by_key(|extent| (extent.source, extent.start));
            for extent in own.iter().filter(|extent| extent.source == one.source) {
                if extent.start <= at && at < extent.end {
                    at = extent.end;
                }
            }
            assert!(at >= one.end, "{one:?} lacks bytes from {at}: {extents:?}");
        }
        // They are apart, in the file, and not too long; complete chunks, if wanted.
        let mut sorted = extents.clone();
        sorted.sort_by_key(|extent| (extent.source, extent.start));
        for pair in sorted.windows(2) {
            assert!(
                pair[0].source < pair[1].source || pair[0].end <= pair[1].start,
                "{pair:?}"
            );
        }
        for (number, extent) in extents.iter().enumerate() {
            let size = sizes[extent.source as usize];
            assert!(
                extent.start < extent.end
                    && extent.end <= size
                    && extent.n_bytes() <= rules.request_bytes
            );
            if in_chunks {
                assert!(extent.start.is_multiple_of(CHUNK));
                assert!(extent.end.is_multiple_of(CHUNK) || extent.end == size);
            }
            // What is kept is what is wanted of it and not direct.
            let kept = &extent.kept;
            assert!(kept.iter().all(|range| extent.start <= range.0
                && range.0 < range.1
                && range.1 <= extent.end));
            assert!(
                kept.windows(2).all(|pair| pair[0].1 < pair[1].0),
                "{extent:?}"
            );
            for at in (extent.start..extent.end).step_by(CHUNK_BYTES / 2) {
                let is_wanted = |one: &&Wanted| {
                    let (start, end) = widened(one);
                    one.source == extent.source && !one.is_direct && start <= at && at < end
                };
                let is_kept = kept.iter().any(|range| range.0 <= at && at < range.1);
                assert_eq!(
                    is_kept,
                    wanted.iter().any(|one| is_wanted(&one)),
                    "{at} of {extent:?}"
                );
            }
            let parts: Vec<usize> = (0..n_parts)
                .filter(|&part| planned.of_parts[part].contains(&(number as u32)))
                .collect();
            assert_eq!(parts.first(), Some(&extent.first_part));
        }
        // Requests begin in the order of the work.
        assert!(extents.is_sorted_by_key(|extent| extent.first_part));
        // No gap of more than the limit is fetched, and nothing twice.
        let mut touched: Vec<Vec<(u64, u64)>> = vec![Vec::new(); sizes.len()];
        for one in wanted {
            touched[one.source as usize].push(widened(one));
        }
        for extent in extents {
            let mut at = extent.start;
            let mut ranges = touched[extent.source as usize].clone();
            ranges.sort_unstable();
            for (start, end) in ranges {
                if end > at && start < extent.end {
                    assert!(
                        start.saturating_sub(at) < rules.gap_bytes.max(1),
                        "a gap before {start} in {extent:?}"
                    );
                    at = at.max(end);
                }
            }
            assert!(
                at >= extent.end,
                "{extent:?} ends with bytes that nobody wants"
            );
        }
    }

    proptest! {
        #[test]
        fn extents_hold_what_is_wanted_and_little_else(
            ranges in prop::collection::vec((0..2_u32, 0..40 * CHUNK, 1..6 * CHUNK, 0..5_usize, any::<bool>()), 0..20),
            gap_chunks in 0..6_u64,
            request_chunks in 1..8_u64,
            in_chunks: bool,
        ) {
            let sizes = [44 * CHUNK + 77, 46 * CHUNK];
            let wanted: Vec<_> = ranges.into_iter().map(|(source, start, n, part, is_direct)| {
                let end = start + n.min(sizes[source as usize] - start);
                Wanted { source, start, end, part, is_direct }
            }).collect();
            let rules = Rules { gap_bytes: gap_chunks * CHUNK, request_bytes: request_chunks * CHUNK };
            check(&wanted, 5, rules, &sizes, in_chunks);
        }
    }

    #[test]
    fn neighbours_are_one_request_and_distant_ranges_are_two() {
        let rules = Rules::of(Link::default(), 1 << 30);
        let one = |start, part| Wanted {
            source: 0,
            start,
            end: start + 100,
            part,
            is_direct: false,
        };
        let planned = plan(
            &[one(0, 0), one(1 << 20, 1), one(64 << 20, 2)],
            3,
            rules,
            |_| (100 << 20, true),
        );
        let found: Vec<_> = planned
            .in_order
            .iter()
            .map(|extent| (extent.start, extent.end))
            .collect();
        assert_eq!(
            found,
            [(0, (1 << 20) + CHUNK), (64 << 20, (64 << 20) + CHUNK)]
        );
        assert_eq!(planned.of_parts, [vec![0], vec![0], vec![1]]);
    }

    #[test]
    fn a_slow_answer_makes_large_gaps_and_few_bytes_make_small_requests() {
        let of = |gap_bytes, n_at_once, n_bytes| {
            let link = Link {
                gap_bytes,
                n_at_once,
            };
            Rules::of(link, n_bytes)
        };
        let rules = |gap_bytes, request_bytes| Rules {
            gap_bytes,
            request_bytes,
        };
        assert_eq!(of(CHUNK, 32, 1 << 20), rules(CHUNK, 2 << 20));
        assert_eq!(of(CHUNK, 32, 120_000_000), rules(CHUNK, 4 << 20));
        assert_eq!(of(CHUNK, 4, 120_000_000), rules(CHUNK, 8 << 20));
        assert_eq!(of(3 << 20, 32, 1 << 20), rules(3 << 20, 4 << 20));
        assert_eq!(of(16 << 20, 64, 1 << 40), rules(16 << 20, 8 << 20));
    }

    #[test]
    fn a_long_range_is_cut() {
        let wanted = [Wanted {
            source: 0,
            start: 100,
            end: 20 << 20,
            part: 0,
            is_direct: false,
        }];
        let rules = Rules::of(Link::default(), 1 << 30);
        let planned = plan(&wanted, 1, rules, |_| (20 << 20, false));
        let found: Vec<_> = planned
            .in_order
            .iter()
            .map(|extent| (extent.start, extent.end))
            .collect();
        assert_eq!(
            found,
            [(100, 8 << 20), (8 << 20, 16 << 20), (16 << 20, 20 << 20)]
        );
    }
}
