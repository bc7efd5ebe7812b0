//! Which way of copying is the fastest on this machine.
//!
//! Processors and virtual machines differ in what a copy costs. Non-temporal stores, prefetching, the order of the
//! parts, and the page tables of a map gain 30% on one machine and lose on another. So the first large execution in a
//! process tries each way on the bytes that it copies anyway, and measures. The fastest way is used from then on. All
//! ways copy the same bytes.
//!
//! ```text
//! for each long copy of a large execution, until all samples exist:
//!     copy it by the next way; record its processor time per byte
//! when all samples exist: keep the way with the least time; small executions never measure
//! ```
//!
//! A sample is one copy of at least 512 KiB whose source is in memory. Each way has four samples, in two groups, and
//! the second smallest of them counts: the first access to unbacked memory disturbs some samples. The time is that of
//! the thread, without the time in which other processes run.
//! The first way of a case is used before all samples exist, and afterwards unless another is 5% faster.

use crate::bytes::memory::Stores;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Executions of fewer bytes measure nothing.
const LARGE_BYTES: u64 = 128 << 20;
/// Shorter copies are no samples.
const SAMPLE_BYTES: u64 = 512 << 10;
/// Samples of one way.
const N_SAMPLES: usize = 4;
/// Copies in sequence that use the same way: threads that run concurrently then use the same one in most cases.
const GROUP: usize = 2;
const MAX_WAYS: usize = 4;

/// How the bytes of a copy reach its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) fetch: Fetch,
    /// Whether long runs use non-temporal stores.
    pub(crate) streams: bool,
    /// Whether short runs with gaps are prefetched.
    pub(crate) prefetches: bool,
    /// Whether the last part is copied first. The system clears a new page before it is written, and the part that it
    /// cleared last is still in the cache.
    pub(crate) descends: bool,
}

impl Way {
    fn describe(self) -> String {
        let fetch = match self.fetch {
            Fetch::Map => "map",
            Fetch::Read => "read",
        };
        let stores = if self.streams { ", non-temporal" } else { "" };
        let prefetch = if self.prefetches { "" } else { ", no prefetch" };
        let order = if self.descends {
            ", last part first"
        } else {
            ""
        };
        format!("{fetch}{stores}{prefetch}{order}")
    }
}

/// How the bytes of a file are fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fetch {
    /// Out of a map; if they are verified, in the same pass.
    Map,
    /// By positioned reads into the destination, and verified there. Sources that cannot be read use their map.
    Read,
}

/// What is copied. Each case has its own measurement for each kind of destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// One run of a file.
    Run,
    /// One run of a file whose chunks are verified.
    VerifiedRun,
    /// One run of memory of the caller.
    Memory,
    /// Runs with gaps between them.
    Strided,
}

/// Plain stores out of a map.
pub(crate) const DEFAULT_WAY: Way = MAP;

const MAP: Way = Way {
    fetch: Fetch::Map,
    streams: false,
    prefetches: true,
    descends: false,
};
const MAP_DOWN: Way = Way {
    descends: true,
    ..MAP
};
const MAP_STREAM: Way = Way {
    streams: true,
    ..MAP
};
const NO_PREFETCH: Way = Way {
    prefetches: false,
    ..MAP
};
const NO_PREFETCH_STREAM: Way = Way {
    streams: true,
    ..NO_PREFETCH
};
const READ: Way = Way {
    fetch: Fetch::Read,
    ..MAP
};
const READ_STREAM: Way = Way {
    streams: true,
    ..READ
};

/// The ways of a case. The first one is the default.
const fn ways(case: Case, stores: Stores) -> &'static [Way] {
    match (case, stores) {
        (Case::Run, Stores::Fresh) => &[MAP, MAP_DOWN, READ],
        (Case::VerifiedRun, Stores::Fresh) => &[MAP_DOWN, MAP, READ],
        (Case::Run | Case::VerifiedRun, Stores::Streaming) => &[MAP_STREAM, MAP, READ_STREAM],
        (Case::Run | Case::VerifiedRun, Stores::Plain) => &[MAP, READ],
        (Case::Memory, Stores::Fresh) => &[MAP, MAP_DOWN],
        (Case::Memory, Stores::Streaming) => &[MAP_STREAM, MAP],
        (Case::Memory, Stores::Plain) => &[MAP],
        (Case::Strided, Stores::Fresh) => &[MAP_DOWN, MAP, NO_PREFETCH],
        (Case::Strided, Stores::Streaming) => &[MAP_STREAM, MAP, NO_PREFETCH_STREAM, NO_PREFETCH],
        (Case::Strided, Stores::Plain) => &[MAP, NO_PREFETCH],
    }
}

/// The choices of a process: for each case and kind of destination, the samples and the fastest way.
///
/// There is no lock: a child process that is forked during a measurement finishes it by itself.
#[derive(Debug)]
pub struct Tuning {
    choices: [[Choice; 3]; 4],
    /// The number of the way that is always used, or of the last one if there are fewer.
    forced: Option<usize>,
}

/// The measured time of one way of a case.
#[derive(Debug, Clone)]
pub struct Measured {
    /// What was copied, and into which memory.
    pub case: String,
    /// How it was copied.
    pub way: String,
    /// The second smallest of its samples, on one thread.
    pub picoseconds_per_byte: u64,
    /// Whether it is the one that is used.
    pub is_used: bool,
}

#[derive(Debug)]
struct Choice {
    /// Number of the fastest way, plus 1; 0 before all samples exist.
    chosen: AtomicUsize,
    n_started: AtomicUsize,
    n_done: AtomicUsize,
    /// Picoseconds per byte, by way and sample.
    samples: [[AtomicU64; N_SAMPLES]; MAX_WAYS],
}

impl Choice {
    const fn new() -> Self {
        Self {
            chosen: AtomicUsize::new(0),
            n_started: AtomicUsize::new(0),
            n_done: AtomicUsize::new(0),
            samples: [const { [const { AtomicU64::new(0) }; N_SAMPLES] }; MAX_WAYS],
        }
    }

    /// Picoseconds per byte of a way. All samples exist.
    fn time(&self, way: usize) -> u64 {
        let mut samples: Vec<u64> = self.samples[way]
            .iter()
            .map(|sample| sample.load(Ordering::Relaxed))
            .collect();
        samples.sort_unstable();
        samples[1]
    }

    /// Number of the fastest of `n_ways` ways. All samples exist.
    fn fastest(&self, n_ways: usize) -> usize {
        let time = |way| self.time(way);
        let best = (0..n_ways).min_by_key(|way| time(*way)).unwrap_or(0);
        if time(best) * 100 < time(0) * 95 {
            best
        } else {
            0
        }
    }
}

impl Tuning {
    const fn new(forced: Option<usize>) -> Self {
        Self {
            choices: [const { [const { Choice::new() }; 3] }; 4],
            forced,
        }
    }

    /// The choices of this process.
    pub fn of_process() -> &'static Self {
        static TUNING: Tuning = Tuning::new(None);
        &TUNING
    }

    /// Always the way with a number, from 0 on, for tests; of fewer ways, the last one. Nothing is measured.
    pub const fn forced(number: usize) -> Self {
        Self::new(Some(number))
    }

    /// What was measured so far: a line for each way of each case that has samples.
    pub fn report(&self) -> Vec<Measured> {
        let cases = [Case::Run, Case::VerifiedRun, Case::Memory, Case::Strided];
        let memories = [Stores::Fresh, Stores::Plain, Stores::Streaming];
        let mut lines = Vec::new();
        for (case, memory) in cases.into_iter().flat_map(|c| memories.map(|m| (c, m))) {
            let choice = &self.choices[case as usize][memory as usize];
            let Some(chosen) = choice.chosen.load(Ordering::Acquire).checked_sub(1) else {
                continue;
            };
            for (number, way) in ways(case, memory).iter().enumerate() {
                lines.push(Measured {
                    case: format!("{case:?}, {memory:?}"),
                    way: way.describe(),
                    picoseconds_per_byte: choice.time(number),
                    is_used: number == chosen,
                });
            }
        }
        lines
    }

    /// Whether an execution of a size is measured.
    pub(crate) fn measures(&self, n_bytes: u64) -> bool {
        self.forced.is_none() && n_bytes >= LARGE_BYTES
    }

    /// The way for a copy of `n_bytes` bytes. `may_measure` is called only if the copy can be a sample.
    pub(crate) fn pick(
        &self,
        case: Case,
        stores: Stores,
        n_bytes: u64,
        may_measure: impl FnOnce() -> bool,
    ) -> Picked<'_> {
        let ways = ways(case, stores);
        let choice = &self.choices[case as usize][stores as usize];
        let way = |number: usize| Picked {
            way: ways[number.min(ways.len() - 1)],
            sample: None,
        };
        if let Some(number) = self.forced {
            return way(number);
        }
        if let Some(number) = choice.chosen.load(Ordering::Relaxed).checked_sub(1) {
            return way(number);
        }
        if ways.len() == 1 || n_bytes < SAMPLE_BYTES || !may_measure() {
            return way(0);
        }
        let started = choice.n_started.fetch_add(1, Ordering::Relaxed);
        if started >= ways.len() * N_SAMPLES {
            return way(0);
        }
        let number = started / GROUP % ways.len();
        let index = started / (GROUP * ways.len()) * GROUP + started % GROUP;
        Picked {
            way: ways[number],
            sample: Some(Sample {
                choice,
                n_ways: ways.len(),
                to: &choice.samples[number][index],
                n_bytes,
                started_ns: cpu_ns(),
            }),
        }
    }
}

/// A way, and the measurement of the copy that uses it.
pub(crate) struct Picked<'a> {
    pub(crate) way: Way,
    sample: Option<Sample<'a>>,
}

struct Sample<'a> {
    choice: &'a Choice,
    n_ways: usize,
    to: &'a AtomicU64,
    n_bytes: u64,
    started_ns: u64,
}

impl Picked<'_> {
    /// Records the time of the copy, which is complete. After the last sample the way is chosen.
    pub(crate) fn finish(self) {
        let Some(sample) = self.sample else { return };
        let nanoseconds = cpu_ns().wrapping_sub(sample.started_ns);
        let picoseconds = nanoseconds.saturating_mul(1000) / sample.n_bytes;
        sample.to.store(picoseconds, Ordering::Relaxed);
        let choice = sample.choice;
        // The last sample is stored after all others: it sees their values.
        if choice.n_done.fetch_add(1, Ordering::AcqRel) + 1 == sample.n_ways * N_SAMPLES {
            let fastest = choice.fastest(sample.n_ways);
            choice.chosen.store(fastest + 1, Ordering::Release);
        }
    }
}

/// Nanoseconds for which this thread has run.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec
        .cast_unsigned()
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: u64 = 2 << 20;

    /// Copies with a pretended duration for each way, until a way is chosen. Returns its number of samples, by way.
    fn measure(tuning: &Tuning, slow: impl Fn(Way, usize) -> u64) -> Vec<(Way, usize)> {
        let mut counts: Vec<(Way, usize)> = Vec::new();
        loop {
            let mut picked = tuning.pick(Case::Run, Stores::Streaming, LONG, || true);
            let Some(sample) = &mut picked.sample else {
                return counts;
            };
            let way = picked.way;
            let i = counts.iter().position(|(of, _)| *of == way);
            let i = i.unwrap_or_else(|| {
                counts.push((way, 0));
                counts.len() - 1
            });
            sample.started_ns = sample
                .started_ns
                .wrapping_sub(slow(way, counts[i].1) * 1000);
            counts[i].1 += 1;
            picked.finish();
        }
    }

    fn chosen(tuning: &Tuning) -> Way {
        let never = || panic!("a choice exists");
        tuning.pick(Case::Run, Stores::Streaming, LONG, never).way
    }

    #[test]
    fn the_fastest_way_is_kept_although_some_samples_are_disturbed() {
        let tuning = Tuning::new(None);
        let counts = measure(&tuning, |way, i| match way.fetch {
            Fetch::Read if i % 3 == 0 => 900_000, // disturbed
            Fetch::Read => 100_000,
            _ if i == 2 => 1_000, // a sample out of the cache
            Fetch::Map => 200_000,
        });
        assert_eq!(counts.len(), 3);
        assert!(counts.iter().all(|(_, n)| *n == N_SAMPLES), "{counts:?}");
        assert_eq!(chosen(&tuning).fetch, Fetch::Read);
        // Other destinations and cases have their own choices.
        let other = tuning.pick(Case::Run, Stores::Fresh, LONG, || false);
        assert_eq!(other.way, MAP);
    }

    #[test]
    fn a_small_difference_keeps_the_default() {
        let tuning = Tuning::new(None);
        measure(
            &tuning,
            |way, _| if way.streams { 103_000 } else { 100_000 },
        );
        assert_eq!(chosen(&tuning), MAP_STREAM);
    }

    #[test]
    fn short_copies_and_small_executions_are_not_measured() {
        let tuning = Tuning::new(None);
        assert!(!tuning.measures(LARGE_BYTES - 1) && tuning.measures(LARGE_BYTES));
        for _ in 0..100 {
            let picked = tuning.pick(Case::Run, Stores::Fresh, SAMPLE_BYTES - 1, || true);
            assert!(picked.sample.is_none() && picked.way == MAP);
        }
        assert!(!Tuning::forced(1).measures(LARGE_BYTES));
    }
}
