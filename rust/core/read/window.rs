//! Requests of remote sources, sent before the bands that need the bytes: several at once, in bounded memory.
//!
//! Threads fetch the extents of a plan in their order. Long runs are fetched straight into the destination and verified
//! there; the rest of an extent is kept until the last band that needs it is done. A band waits for its extents. If memory
//! is used up, no request is begun that needs some, unless a band waits for it: then there are at most as many extents
//! more as bands need at once. How many threads there are follows [`Link::n_at_once`].

use crate::bytes::memory::Memory;
use crate::bytes::strided::{Dim, restrict, src_span};
use crate::check::verify::{Checks, verify_chunks};
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::files::checksum::Checksums;
use crate::files::shard_file::ShardFile;
use crate::files::source::{Link, Part, Source};
use crate::planning::extents::{self, Extents, Rules, Wanted};
use crate::planning::plan::{CopyOp, Plan, PlanSource};
use crate::read::readahead::{Piece, SCRATCH_BYTES, skips_gaps};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Duration;

/// The most bytes that are kept for bands, or being fetched for them.
const BUDGET_BYTES: u64 = 256 << 20;
/// Memory for so many bytes is used again for other extents: to clear new pages takes longer than to fill them.
const MIN_REUSED_BYTES: u64 = 1 << 20;
/// How often a waiting band looks whether the run was cancelled.
const TICK: Duration = Duration::from_millis(50);

/// A run that is fetched into its destination. No two of a source overlap.
pub(crate) struct Direct<'a> {
    /// The number of the source.
    pub(crate) source: u32,
    /// The file.
    pub(crate) file: &'a ShardFile,
    /// Its checksums, if it is verified. Then the run consists of complete chunks.
    pub(crate) checksums: Option<&'a Checksums>,
    /// First byte in the file.
    pub(crate) start: u64,
    /// The destination.
    pub(crate) to: &'a mut [u8],
    /// The array, for messages.
    pub(crate) name: &'a str,
}

impl Direct<'_> {
    /// Its range, as that of a part of the work.
    pub(crate) fn wanted(&self, part: usize) -> Wanted {
        Wanted {
            source: self.source,
            start: self.start,
            end: self.start + self.to.len() as u64,
            part,
            is_direct: true,
        }
    }
}

static WANTED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes that plans with remote sources had to return or write, in this process so far. What was fetched for them can be more.
pub fn wanted_bytes() -> u64 {
    WANTED_BYTES.load(Ordering::Relaxed)
}

/// What is fetched before it is needed.
pub(crate) trait Early: Sync {
    /// Waits until the extents of a part of the work are there.
    ///
    /// # Errors
    /// One of them cannot be fetched, or the run was cancelled.
    fn wait_for(&self, part: usize, control: &Control) -> Result<()>;

    /// Notes that a part of the work is done: what no other part needs is freed.
    fn finish(&self, part: usize);

    /// Fills a buffer with a range of a source of the plan; false if a part of it was not fetched.
    fn read_at(&self, source: u32, start: u64, to: &mut [u8]) -> bool;
}

/// The extents of a plan, and the state of their requests.
pub(crate) struct Window<'a> {
    plan: &'a Plan<'a>,
    extents: &'a Extents,
    /// The numbers of the extents of each source, sorted by their first byte.
    of_sources: Vec<Vec<u32>>,
    /// The ranges of each extent that are kept. A run that overlaps one is fetched with it, and copied.
    kept: Vec<Vec<(u64, u64)>>,
    request_bytes: u64,
    paced: Vec<&'a Source>,
    n_threads: AtomicUsize,
    state: Mutex<State<'a>>,
    changed: Condvar,
    budget_bytes: u64,
}

struct State<'a> {
    slots: Vec<Slot>,
    /// How many bands still need each extent, and whether runs do.
    n_users: Vec<usize>,
    /// The runs of each extent, sorted.
    direct: Vec<Vec<Direct<'a>>>,
    next: usize,
    /// Extents before this one are needed by a band that waits.
    urgent: usize,
    /// Extents of which nothing is kept.
    without_memory: VecDeque<u32>,
    held_bytes: u64,
    free: Vec<Memory>,
    outcome: Result<()>,
    is_stopped: bool,
}

enum Slot {
    Waiting,
    Fetching,
    Ready(Arc<Kept>),
    Done,
}

impl State<'_> {
    fn has_waiting(&self) -> bool {
        self.next < self.slots.len() || !self.without_memory.is_empty()
    }
}

/// What is kept of an extent: its ranges one after the other in memory.
struct Kept {
    /// First byte and end in the source, and where the range begins in memory.
    ranges: Vec<(u64, u64, usize)>,
    bytes: Bytes,
}

impl Kept {
    fn new(ranges: &[(u64, u64)], bytes: Bytes) -> Self {
        let mut at = 0;
        let with_place = |&(start, end): &(u64, u64)| {
            let begin = at;
            at += (end - start) as usize;
            (start, end, begin)
        };
        Self {
            ranges: ranges.iter().map(with_place).collect(),
            bytes,
        }
    }

    /// A range; `None` if a part of it is not kept.
    fn get(&self, start: u64, end: u64) -> Option<&[u8]> {
        let next = self.ranges.partition_point(|range| range.1 <= start);
        let &(first, last, at) = self.ranges.get(next)?;
        let is_inside = first <= start && end <= last;
        let from = at + start.saturating_sub(first) as usize;
        is_inside.then(|| &self.bytes.as_slice()[from..from + (end - start) as usize])
    }
}

/// Whether the byte at a position is in one of some sorted ranges.
fn is_kept(ranges: &[(u64, u64)], at: u64) -> bool {
    let next = ranges.partition_point(|range| range.1 <= at);
    ranges.get(next).is_some_and(|range| range.0 <= at)
}

/// Adds a range to sorted ranges that are apart, if it overlaps one of them.
fn keep_overlapped(ranges: &mut Vec<(u64, u64)>, start: u64, end: u64) {
    let first = ranges.partition_point(|range| range.1 <= start);
    let last = ranges.partition_point(|range| range.0 < end);
    if first < last {
        let joined = (start.min(ranges[first].0), end.max(ranges[last - 1].1));
        ranges.splice(first..last, [joined]);
    }
}

enum Bytes {
    Small(Vec<u8>),
    Reused(Memory),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Reused(memory) => memory.as_slice(),
        }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Reused(memory) => memory.as_mut_slice(),
        }
    }
}

impl<'a> Window<'a> {
    pub(crate) fn new(
        plan: &'a Plan<'a>,
        extents: &'a Extents,
        rules: Rules,
        direct: Vec<Direct<'a>>,
    ) -> Self {
        let mut of_sources = vec![Vec::new(); plan.sources.len()];
        for (number, extent) in extents.in_order.iter().enumerate() {
            of_sources[extent.source as usize].push(number as u32);
        }
        for numbers in &mut of_sources {
            numbers.sort_by_key(|&number| extents.in_order[number as usize].start);
        }
        let mut n_users = vec![0; extents.in_order.len()];
        for &number in extents.of_parts.iter().flatten() {
            n_users[number as usize] += 1;
        }
        let mut kept: Vec<_> = extents
            .in_order
            .iter()
            .map(|one| one.kept.clone())
            .collect();
        let mut of_extents: Vec<Vec<Direct<'_>>> = kept.iter().map(|_| Vec::new()).collect();
        for run in direct {
            // It lies in one extent: both are cut at multiples of the size of a request.
            let numbers = &of_sources[run.source as usize];
            let starts_before =
                |&number: &u32| extents.in_order[number as usize].start <= run.start;
            let number = numbers[numbers.partition_point(starts_before) - 1] as usize;
            keep_overlapped(
                &mut kept[number],
                run.start,
                run.start + run.to.len() as u64,
            );
            of_extents[number].push(run);
        }
        let without_memory =
            (0..kept.len() as u32).filter(|&number| kept[number as usize].is_empty());
        let without_memory = without_memory.collect();
        Self {
            kept,
            plan,
            extents,
            of_sources,
            request_bytes: rules.request_bytes,
            paced: paced(plan),
            n_threads: AtomicUsize::new(0),
            state: Mutex::new(State {
                slots: extents.in_order.iter().map(|_| Slot::Waiting).collect(),
                n_users,
                direct: of_extents,
                next: 0,
                urgent: 0,
                without_memory,
                held_bytes: 0,
                free: Vec::new(),
                outcome: Ok(()),
                is_stopped: false,
            }),
            changed: Condvar::new(),
            budget_bytes: BUDGET_BYTES,
        }
    }

    /// Runs `work` while threads fetch what it needs; then waits for the runs that are fetched into the destination.
    pub(crate) fn run<T>(&self, control: &Control, work: impl FnOnce() -> Result<T>) -> Result<T> {
        WANTED_BYTES.fetch_add(self.plan.n_bytes(), Ordering::Relaxed);
        let n_at_once = slowest(&self.paced).n_at_once;
        let value = std::thread::scope(|scope| {
            for _ in 0..n_at_once.min(self.extents.in_order.len()) {
                if !self.start(scope, control) {
                    break;
                }
            }
            if self.n_threads.load(Ordering::Relaxed) == 0 {
                self.fetch_direct(control)?;
            }
            // Also if the work panics: the scope waits for its threads.
            let unfinished = Stop(self);
            let done = work();
            if done.is_ok() {
                std::mem::forget(unfinished);
            }
            done
        })?;
        let outcome = std::mem::replace(&mut self.lock().outcome, Ok(()));
        outcome.map(|()| value)
    }

    /// Without a thread: fetches the extents with runs. Bands read what they need themselves.
    fn fetch_direct(&self, control: &Control) -> Result<()> {
        for number in 0..self.extents.in_order.len() {
            control.check()?;
            let is_direct = !self.lock().direct[number].is_empty();
            if is_direct {
                self.fetch_extent(number as u32, control)?;
            }
            self.lock().slots[number] = Slot::Done;
        }
        Ok(())
    }

    /// Starts a thread that fetches.
    fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        control: &'scope Control,
    ) -> bool {
        let number = self.n_threads.fetch_add(1, Ordering::Relaxed);
        let thread = Builder::new().name(format!("reshard-fetch-{number}"));
        let is_started = thread
            .spawn_scoped(scope, move || self.fetch(scope, control))
            .is_ok();
        if !is_started {
            self.n_threads.fetch_sub(1, Ordering::Relaxed);
        }
        is_started
    }

    /// Begins no other request.
    fn stop(&self, outcome: Result<()>) {
        let mut state = self.lock();
        if state.outcome.is_ok() {
            state.outcome = outcome;
        }
        state.is_stopped = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Fetches until nothing is left, or until fewer requests at once are faster.
    fn fetch<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, control: &'scope Control) {
        while let Some(number) = self.next_extent() {
            let done = self.fetch_extent(number, control);
            if let Err(error) = done.and_then(|()| control.check()) {
                self.stop(Err(error));
            }
            let n_at_once = slowest(&self.paced).n_at_once.max(1);
            if self.n_threads.load(Ordering::Relaxed) < n_at_once && self.lock().has_waiting() {
                self.start(scope, control);
            }
            let fewer = |n: usize| (n > n_at_once).then(|| n - 1);
            let order = Ordering::Relaxed;
            if self.n_threads.fetch_update(order, order, fewer).is_ok() {
                return;
            }
        }
    }

    fn next_extent(&self) -> Option<u32> {
        let mut state = self.lock();
        loop {
            if state.is_stopped {
                return None;
            }
            let next = state.next;
            let has_next = next < state.slots.len();
            if has_next && !matches!(state.slots[next], Slot::Waiting) {
                state.next += 1;
                continue;
            }
            let n_bytes = if has_next { self.held_by(next) } else { 0 };
            if has_next
                && (next < state.urgent
                    || state.held_bytes == 0
                    || state.held_bytes + n_bytes <= self.budget_bytes)
            {
                state.next += 1;
                state.held_bytes += n_bytes;
                if n_bytes < self.request_bytes {
                    let most = self.budget_bytes.saturating_sub(state.held_bytes);
                    state.free.truncate((most / self.request_bytes) as usize);
                }
                state.slots[next] = Slot::Fetching;
                return Some(next as u32);
            }
            while let Some(number) = state.without_memory.pop_front() {
                if matches!(state.slots[number as usize], Slot::Waiting) {
                    state.slots[number as usize] = Slot::Fetching;
                    return Some(number);
                }
            }
            if !has_next {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Bytes of memory for an extent.
    fn held_by(&self, number: usize) -> u64 {
        let n_bytes = self.kept[number]
            .iter()
            .map(|(start, end)| end - start)
            .sum();
        if n_bytes < MIN_REUSED_BYTES.min(self.request_bytes) {
            n_bytes
        } else {
            self.request_bytes
        }
    }

    /// Memory for what is kept of an extent.
    fn memory(&self, number: usize) -> Result<Bytes> {
        let n_bytes = self.held_by(number);
        if n_bytes < self.request_bytes {
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(n_bytes as usize).map_err(|_| {
                let message = format!("cannot allocate {n_bytes} bytes for a request");
                Error::new(Kind::Io, message).hint("load fewer keys at a time")
            })?;
            bytes.resize(n_bytes as usize, 0);
            return Ok(Bytes::Small(bytes));
        }
        let free = self.lock().free.pop();
        free.map_or_else(|| Memory::new(n_bytes as usize), Ok)
            .map(Bytes::Reused)
    }

    fn fetch_extent(&self, number: u32, control: &Control) -> Result<()> {
        let at = number as usize;
        let extent = &self.extents.in_order[at];
        let PlanSource::File(_, file) = &self.plan.sources[extent.source as usize] else {
            return Ok(());
        };
        let mut runs = std::mem::take(&mut self.lock().direct[at]);
        let mut bytes = self.memory(at)?;
        let kept = &self.kept[at];
        let mut parts: Vec<Part<'_>> = Vec::new();
        let mut rest = bytes.as_mut_slice();
        for &(start, end) in kept {
            let (here, after) = rest.split_at_mut((end - start) as usize);
            parts.push((start, here));
            rest = after;
        }
        for run in runs.iter_mut().filter(|run| !is_kept(kept, run.start)) {
            parts.push((run.start, &mut *run.to));
        }
        parts.sort_unstable_by_key(|part| part.0);
        let fetched = file.source().read_parts(&mut parts);
        fetched.map_err(|error| match runs.first() {
            Some(run) => error.key(run.name),
            None => error,
        })?;
        control.fetched(extent.n_bytes());
        let kept = Kept::new(kept, bytes);
        for run in &mut runs {
            if let Some(from) = kept.get(run.start, run.start + run.to.len() as u64) {
                run.to.copy_from_slice(from);
            }
            verify_direct(run).map_err(|error| error.key(run.name))?;
            control.advance(run.to.len() as u64);
        }
        let mut state = self.lock();
        state.slots[at] = Slot::Ready(Arc::new(kept));
        if !runs.is_empty() {
            self.leave(&mut state, at);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Notes that one of those that need an extent needs it no more.
    fn leave(&self, state: &mut State<'_>, number: usize) {
        state.n_users[number] -= 1;
        if state.n_users[number] > 0 {
            return;
        }
        state.held_bytes = state.held_bytes.saturating_sub(self.held_by(number));
        if let Slot::Ready(kept) = std::mem::replace(&mut state.slots[number], Slot::Done)
            && let Some(Bytes::Reused(memory)) = Arc::into_inner(kept).map(|kept| kept.bytes)
        {
            state.free.push(memory);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Stop<'a, 'b>(&'a Window<'b>);

impl Drop for Stop<'_, '_> {
    fn drop(&mut self) {
        self.0.stop(Ok(()));
    }
}

impl Early for Window<'_> {
    fn wait_for(&self, band: usize, control: &Control) -> Result<()> {
        let numbers = &self.extents.of_parts[band];
        let Some(&last) = numbers.last() else {
            return Ok(());
        };
        let mut state = self.lock();
        loop {
            control.check()?;
            state.outcome.clone()?;
            let is_missing = |&number: &u32| {
                matches!(state.slots[number as usize], Slot::Waiting | Slot::Fetching)
            };
            if !numbers.iter().any(is_missing) {
                return Ok(());
            }
            if state.urgent <= last as usize {
                state.urgent = last as usize + 1;
                self.changed.notify_all();
            }
            let waited = self.changed.wait_timeout(state, TICK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn finish(&self, band: usize) {
        let mut state = self.lock();
        for &number in &self.extents.of_parts[band] {
            self.leave(&mut state, number as usize);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn read_at(&self, source: u32, start: u64, to: &mut [u8]) -> bool {
        let numbers = &self.of_sources[source as usize];
        let extent = |number: u32| &self.extents.in_order[number as usize];
        let first = numbers.partition_point(|&number| extent(number).end <= start);
        let (mut at, end) = (start, start + to.len() as u64);
        let mut parts = Vec::new();
        let state = self.lock();
        for &number in &numbers[first..] {
            if at == end {
                break;
            }
            let Slot::Ready(kept) = &state.slots[number as usize] else {
                return false;
            };
            let until = extent(number).end.min(end);
            parts.push((Arc::clone(kept), at, until));
            at = until;
        }
        drop(state);
        if at < end {
            return false;
        }
        let mut rest = to;
        for (kept, at, until) in &parts {
            let Some(from) = kept.get(*at, *until) else {
                return false;
            };
            let (here, after) = rest.split_at_mut(from.len());
            here.copy_from_slice(from);
            rest = after;
        }
        true
    }
}

/// A remote source of each bucket or host of a plan.
fn paced<'a>(plan: &'a Plan<'_>) -> Vec<&'a Source> {
    let mut found = BTreeMap::new();
    for source in &plan.sources {
        if let PlanSource::File(_, file) = source
            && file.source().is_remote()
        {
            // Such as `s3:` and the bucket.
            let bucket: Vec<_> = file.source().path().components().take(2).collect();
            found.entry(bucket).or_insert_with(|| file.source());
        }
    }
    found.into_values().collect()
}

/// How requests of a plan are made: for all buckets as for the one that takes the fewest at once.
pub(crate) fn link_of(plan: &Plan<'_>) -> Link {
    slowest(&paced(plan))
}

fn slowest(sources: &[&Source]) -> Link {
    let links = sources.iter().map(|source| source.link());
    links.min_by_key(|link| link.n_at_once).unwrap_or_default()
}

/// Whether a source is on another host.
pub(crate) fn has_remote(plan: &Plan<'_>) -> bool {
    let is_remote = |source: &PlanSource| matches!(source, PlanSource::File(_, file) if file.source().is_remote());
    plan.sources.iter().any(is_remote)
}

/// Adds the ranges of remote sources that a part of the work reads. Gaps that no band reads are left out.
pub(crate) fn add_wanted(
    plan: &Plan<'_>,
    part: usize,
    pieces: &mut dyn Iterator<Item = Piece<'_>>,
    wanted: &mut Vec<Wanted>,
) {
    for (array, start, end) in pieces {
        let unit_bytes = array.stored.unit().1;
        for copy_op in array.copy_ops_over(start, end) {
            if !matches!(plan.source(copy_op), PlanSource::File(_, file) if file.source().is_remote())
            {
                continue;
            }
            let mut add = |dims: &[Dim], src: u64, _| -> Result<()> {
                let at = (copy_op, copy_op.src_start_bytes + src * unit_bytes);
                add_box(at, unit_bytes, dims, part, wanted);
                Ok(())
            };
            let _ = restrict(&copy_op.dims, 0, copy_op.dst, (start, end), &mut add);
        }
    }
}

fn add_box(
    (copy_op, start): (&CopyOp, u64),
    unit_bytes: u64,
    dims: &[Dim],
    part: usize,
    wanted: &mut Vec<Wanted>,
) {
    if let Some((widest, inner)) = skips_gaps(dims, unit_bytes, SCRATCH_BYTES) {
        for k in 0..dims[widest].len {
            let start = start + k * dims[widest].src * unit_bytes;
            add_box((copy_op, start), unit_bytes, &inner, part, wanted);
        }
        return;
    }
    let end = start + src_span(dims) * unit_bytes;
    wanted.push(Wanted {
        source: copy_op.source,
        start,
        end,
        part,
        is_direct: false,
    });
}

/// The requests of a plan for the ranges that its parts want.
pub(crate) fn plan_extents(
    plan: &Plan<'_>,
    checks: &Checks,
    wanted: &[Wanted],
    n_parts: usize,
    rules: Rules,
) -> Extents {
    extents::plan(wanted, n_parts, rules, |source| {
        match &plan.sources[source as usize] {
            PlanSource::File(_, file) => (
                file.source().n_bytes(),
                checks.checksums(source, file).is_some(),
            ),
            PlanSource::Memory(bytes) => (bytes.len() as u64, false),
        }
    })
}

fn verify_direct(run: &Direct<'_>) -> Result<()> {
    let Some(checksums) = run.checksums else {
        return Ok(());
    };
    let first = checksums.chunks_over(run.start, 1).start;
    verify_chunks(run.file, checksums, first, run.to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::memory::Stores;
    use crate::bytes::team::Team;
    use crate::error::Kind;
    use crate::files::shard_file::Format;
    use crate::files::source::{Ranges, copy_to_parts, span_of};
    use crate::geometry::dtype::Dtype;
    use crate::geometry::region::Region;
    use crate::planning::index::Index;
    use crate::planning::plan::MemoryTensor;
    use crate::planning::request::Request;
    use crate::read::copy::fill;
    use crate::write::writer::{Buffers, Options, write};
    use std::path::{Path, PathBuf};

    /// The bytes of a file as an object; requests are counted, and one can fail.
    #[derive(Debug)]
    struct Remote {
        bytes: Arc<Vec<u8>>,
        requests: Arc<Mutex<Vec<(u64, u64)>>>,
        /// The request with this number fails.
        fails_at: u64,
        link: Link,
        n_requests: AtomicU64,
        n_open: AtomicUsize,
    }

    const LINK: Link = Link {
        gap_bytes: 2 << 20,
        n_at_once: 3,
    };

    impl Ranges for Remote {
        fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
            let number = self.n_requests.fetch_add(1, Ordering::SeqCst);
            let n_open = self.n_open.fetch_add(1, Ordering::SeqCst);
            assert!(n_open < self.link.n_at_once || self.link.n_at_once == 0);
            if number == self.fails_at {
                return Err(Error::new(Kind::Io, "as intended"));
            }
            std::thread::sleep(Duration::from_millis(1));
            self.n_open.fetch_sub(1, Ordering::SeqCst);
            let start = start as usize;
            to.copy_from_slice(&self.bytes[start..start + to.len()]);
            self.requests
                .lock()
                .unwrap()
                .push((start as u64, to.len() as u64));
            Ok(())
        }

        fn is_remote(&self) -> bool {
            true
        }

        fn link(&self) -> Link {
            self.link
        }

        fn read_parts(&self, parts: &mut [Part<'_>]) -> Result<()> {
            let (start, end) = span_of(parts);
            let mut all = vec![0; (end - start) as usize];
            self.read_at(start, &mut all)?;
            copy_to_parts(&all, start, parts);
            Ok(())
        }
    }

    type Requests = Arc<Mutex<Vec<(u64, u64)>>>;

    fn options() -> Options {
        Options {
            metadata: Vec::new(),
            container: None,
            durable: false,
            direct: false,
            mode: 0o600,
        }
    }

    /// A file with arrays of two and three dims, a long run and many small tensors, and an index of it as an object.
    fn remote(folder: &Path, fails_at: u64, summed: bool, link: Link) -> (Index, Requests, u64) {
        let path = folder.join("model.safetensors");
        let data: Vec<u8> = (0..40 << 20_u32)
            .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let matrix = [2048_u64, 4096];
        let (run, small, wide) = ([20_u64 << 20], [1000_u64], [3, 9_u64 << 20]);
        let deep = [2_u64, 150, 4096];
        let names: Vec<String> = (0..50).map(|i| format!("small.{i:02}")).collect();
        let tensor = |name, shape, from: usize| MemoryTensor {
            name,
            dtype: Dtype::U8,
            shape,
            bytes: &data[from..],
            strides_bytes: (1..=shape.len())
                .map(|i| shape[i..].iter().product())
                .collect(),
        };
        let mut tensors = vec![
            tensor("matrix", &matrix[..], 0),
            tensor("run", &run[..], 9 << 20),
            tensor("wide", &wide[..], 1 << 20),
            tensor("deep", &deep[..], 0),
        ];
        tensors.extend(
            names
                .iter()
                .enumerate()
                .map(|(i, name)| tensor(name, &small[..], (i * 1000) + 77)),
        );
        let plan = Plan::of_memory(tensors).unwrap();
        let (control, mut buffers) = (Control::default(), Buffers::new(64 << 20).unwrap());
        let written = write(&path, &plan, &options(), &mut buffers, &control).unwrap();
        let bytes = Arc::new(std::fs::read(&path).unwrap());
        let (n_bytes, requests) = (bytes.len() as u64, Requests::default());
        let mut index = Index::new();
        let of_source = Arc::clone(&requests);
        let file = index.add_source(
            PathBuf::from("s3://b/model.safetensors"),
            Format::Safetensors,
            move || {
                let ranges = Remote {
                    bytes: Arc::clone(&bytes),
                    requests: Arc::clone(&of_source),
                    fails_at,
                    link,
                    n_requests: AtomicU64::new(0),
                    n_open: AtomicUsize::new(0),
                };
                let path = PathBuf::from("s3://b/model.safetensors");
                Ok(Source::of_ranges(
                    path,
                    bytes.len() as u64,
                    Box::new(ranges),
                ))
            },
        );
        if summed {
            index.set_checksums(file, written.checksums).unwrap();
        }
        index.add_whole_file(file).unwrap();
        (index, requests, n_bytes)
    }

    /// Columns of the matrix, the run, and the small tensors.
    fn request() -> Request {
        let mut request = Request::default();
        request.add_region(
            "columns",
            "matrix",
            Region::new(vec![0, 1000], vec![2048, 100]).unwrap(),
        );
        request.add_region("run", "run", Region::new(vec![0], vec![20 << 20]).unwrap());
        for i in 0..50 {
            let name = format!("small.{i:02}");
            request.add_region(&name, &name, Region::new(vec![0], vec![1000]).unwrap());
        }
        request
    }

    /// As `request`, and bytes of the run two and three times.
    fn repeated() -> Request {
        let mut request = request();
        for (name, start, len) in [
            ("again", 0, 20 << 20),
            ("part", 3 << 20, 9 << 20),
            ("byte", 5_000_000, 1),
        ] {
            let region = Region::new(vec![start], vec![len]).unwrap();
            request.add_region(name, "run", region);
        }
        request
    }

    fn filled(index: &Index, verify: bool, control: &Control) -> Result<Vec<Vec<u8>>> {
        filled_with(&request(), index, verify, control)
    }

    fn filled_with(
        request: &Request,
        index: &Index,
        verify: bool,
        control: &Control,
    ) -> Result<Vec<Vec<u8>>> {
        let plan = index.plan(request, None, verify)?;
        let mut out: Vec<Vec<u8>> = plan
            .arrays()
            .iter()
            .map(|a| vec![0; a.n_bytes() as usize])
            .collect();
        let slices = out.iter_mut().map(Vec::as_mut_slice).collect();
        fill(&plan, slices, Stores::Plain, control, &Team::current())?;
        Ok(out)
    }

    #[test]
    fn what_is_fetched_early_is_what_a_file_holds_and_nothing_is_fetched_twice() {
        for (summed, request) in [true, false]
            .into_iter()
            .flat_map(|summed| [(summed, request()), (summed, repeated())])
        {
            let folder = tempfile::tempdir().unwrap();
            let (index, requests, n_bytes) = remote(folder.path(), u64::MAX, summed, LINK);
            let mut local = Index::new();
            let file = local.add_file(
                folder.path().join("model.safetensors"),
                true,
                crate::source::Method::Read,
            );
            local.add_whole_file(file).unwrap();
            requests.lock().unwrap().clear();
            let control = Control::default();
            let found = filled_with(&request, &index, summed, &control).unwrap();
            let expected = filled_with(&request, &local, false, &Control::default());
            assert!(found == expected.unwrap());
            let mut requests = requests.lock().unwrap().clone();
            requests.sort_unstable();
            for pair in requests.windows(2) {
                assert!(
                    pair[0].0 + pair[0].1 <= pair[1].0,
                    "fetched twice: {pair:?}"
                );
            }
            let fetched: u64 = requests.iter().map(|one| one.1).sum();
            assert!(
                fetched <= n_bytes && control.fetched_bytes() == fetched,
                "{fetched} of {n_bytes}"
            );
            assert!(requests.len() <= 8, "{requests:?}");
            assert_eq!(
                control.done_bytes(),
                found.iter().map(|one| one.len() as u64).sum::<u64>()
            );
        }
    }

    fn fetched_of(key: &str, region: Region, summed: bool, gap_bytes: u64) -> Vec<(u64, u64)> {
        let folder = tempfile::tempdir().unwrap();
        let link = Link { gap_bytes, ..LINK };
        let (index, requests, _) = remote(folder.path(), u64::MAX, summed, link);
        let mut request = Request::default();
        request.add_region("part", key, region);
        index.open(0).unwrap();
        requests.lock().unwrap().clear();
        filled_with(&request, &index, summed, &Control::default()).unwrap();
        requests.lock().unwrap().clone()
    }

    #[test]
    fn large_gaps_between_the_rows_of_a_slice_are_not_read() {
        let columns = || Region::new(vec![0, 1000], vec![3, 300_000]).unwrap();
        for (summed, most) in [(false, 900_000), (true, 3 << 20)] {
            let requests = fetched_of("wide", columns(), summed, 16 << 20);
            let n_bytes: u64 = requests.iter().map(|one| one.1).sum();
            assert!(n_bytes <= most, "{requests:?}");
        }
    }

    #[test]
    fn a_gap_that_a_band_reads_is_fetched_once() {
        let rows = Region::new(vec![0, 0, 0], vec![2, 75, 2000]).unwrap();
        let requests = fetched_of("deep", rows, false, 256 << 10);
        assert_eq!(requests.len(), 1, "{requests:?}");
    }

    #[test]
    fn without_a_thread_all_is_read_nevertheless() {
        let folder = tempfile::tempdir().unwrap();
        let found: Vec<_> = [LINK.n_at_once, 0]
            .into_iter()
            .map(|n_at_once| {
                let link = Link { n_at_once, ..LINK };
                let (index, ..) = remote(folder.path(), u64::MAX, true, link);
                filled_with(&repeated(), &index, true, &Control::default()).unwrap()
            })
            .collect();
        assert!(found[0] == found[1]);
    }

    #[test]
    fn the_bucket_with_the_fewest_requests_at_once_counts() {
        let of = |bucket: &str, n_at_once| {
            let ranges = Remote {
                bytes: Arc::default(),
                requests: Requests::default(),
                fails_at: u64::MAX,
                link: Link { n_at_once, ..LINK },
                n_requests: AtomicU64::new(0),
                n_open: AtomicUsize::new(0),
            };
            let path = PathBuf::from(format!("s3://{bucket}/model"));
            Source::of_ranges(path, 0, Box::new(ranges))
        };
        let sources = [of("a", 32), of("b", 8), of("c", 16)];
        assert_eq!(slowest(&sources.each_ref()).n_at_once, 8);
        assert_eq!(slowest(&[]), Link::default());
    }

    #[test]
    fn the_first_failure_ends_the_run() {
        for fails_at in [2, 4] {
            let folder = tempfile::tempdir().unwrap();
            let (index, ..) = remote(folder.path(), fails_at, true, LINK);
            let error = filled(&index, true, &Control::default()).unwrap_err();
            assert!(error.message().contains("as intended"), "{error}");
        }
    }

    #[test]
    fn the_error_of_a_request_names_an_array() {
        let folder = tempfile::tempdir().unwrap();
        let (index, ..) = remote(folder.path(), 2, true, LINK);
        let mut request = Request::default();
        request.add_region("run", "run", Region::new(vec![0], vec![20 << 20]).unwrap());
        let error = filled_with(&request, &index, true, &Control::default()).unwrap_err();
        assert_eq!(error.facts().1, Some("run"), "{error:?}");
    }

    #[test]
    fn a_cancelled_run_ends() {
        let folder = tempfile::tempdir().unwrap();
        let (index, ..) = remote(folder.path(), u64::MAX, true, LINK);
        index.open(0).unwrap();
        let control = Control::default();
        control.cancel();
        assert_eq!(
            filled(&index, true, &control).unwrap_err().kind(),
            Kind::Cancelled
        );
    }

    #[test]
    fn a_written_file_is_fetched_early_too() {
        let folder = tempfile::tempdir().unwrap();
        let (index, requests, n_bytes) = remote(folder.path(), u64::MAX, true, LINK);
        let plan = index.plan(&request(), None, true).unwrap();
        requests.lock().unwrap().clear();
        let (control, mut buffers) = (Control::default(), Buffers::new(64 << 20).unwrap());
        let path = folder.path().join("copy.safetensors");
        write(&path, &plan, &options(), &mut buffers, &control).unwrap();
        let mut copy = Index::new();
        let file = copy.add_file(path, true, crate::source::Method::Read);
        copy.add_whole_file(file).unwrap();
        let found = filled(&index, true, &Control::default()).unwrap();
        let mut whole = Request::default();
        for array in plan.arrays() {
            let shape = array.shape.to_vec();
            whole.add_region(
                &array.name,
                &array.name,
                Region::new(vec![0; shape.len()], shape).unwrap(),
            );
        }
        let again = copy.plan(&whole, None, false).unwrap();
        let mut out: Vec<Vec<u8>> = again
            .arrays()
            .iter()
            .map(|a| vec![0; a.n_bytes() as usize])
            .collect();
        let slices = out.iter_mut().map(Vec::as_mut_slice).collect();
        fill(
            &again,
            slices,
            Stores::Plain,
            &Control::default(),
            &Team::current(),
        )
        .unwrap();
        assert!(out == found);
        assert!(
            control.fetched_bytes() <= n_bytes,
            "{} of {n_bytes}",
            control.fetched_bytes()
        );
    }

    #[test]
    fn memory_is_bounded_and_a_waiting_part_gets_what_it_needs() {
        let folder = tempfile::tempdir().unwrap();
        let (index, ..) = remote(folder.path(), u64::MAX, true, LINK);
        let plan = index.plan(&request(), None, true).unwrap();
        let n_parts = 20;
        let wanted: Vec<_> = (0..n_parts as u64)
            .map(|i| Wanted {
                source: 0,
                start: i << 20,
                end: (i + 1) << 20,
                part: i as usize,
                is_direct: false,
            })
            .collect();
        let rules = Rules {
            gap_bytes: 1,
            request_bytes: 1 << 20,
        };
        let extents = plan_extents(&plan, &Checks::new(&plan), &wanted, n_parts, rules);
        let mut window = Window::new(&plan, &extents, rules, Vec::new());
        window.budget_bytes = 3 << 20;
        let control = Control::default();
        window
            .run(&control, || {
                // The last part first: all extents before it are fetched, too.
                window.wait_for(n_parts - 1, &control)?;
                let mut to = vec![0; 100];
                assert!(window.read_at(0, (19 << 20) + 5, &mut to));
                assert!(
                    !window.read_at(0, (20 << 20) - 5, &mut to),
                    "beyond its end"
                );
                for part in 0..n_parts {
                    window.wait_for(part, &control)?;
                    window.finish(part);
                }
                assert!(!window.read_at(0, 5, &mut to), "it is freed");
                assert_eq!(window.lock().held_bytes, 0);
                Ok(())
            })
            .unwrap();
    }
}
