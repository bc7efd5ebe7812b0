//! Requests of remote sources, sent before the bands that need the bytes: several at once, in bounded memory.
//!
//! Threads fetch the extents of a plan in their order. Long runs are fetched straight into the destination and verified
//! there; other extents are kept until the last band that needs them is done. A band waits for its extents. If memory is
//! used up, no request is begun, unless a band waits for it: then there are at most as many extents more as bands need at
//! once.

use crate::bytes::strided::{Dim, restrict, src_span};
use crate::check::verify::{Checks, verify_chunks};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::files::checksum::Checksums;
use crate::files::shard_file::ShardFile;
use crate::planning::extents::{self, Extents, Rules, Wanted};
use crate::planning::plan::{CopyOp, Plan, PlanSource};
use crate::read::readahead::{Piece, skips_gaps};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most bytes that are kept for bands, or being fetched for them.
const BUDGET_BYTES: u64 = 256 << 20;
/// Requests at once. More than 32 are not faster on object stores.
const N_REQUESTS: usize = 32;
/// How often a waiting band looks whether the run was cancelled.
const TICK: Duration = Duration::from_millis(50);

/// A run that is fetched into its destination.
pub(crate) struct Direct<'a> {
    /// The file.
    pub(crate) file: &'a ShardFile,
    /// Its checksums, if it is verified. Then the run consists of complete chunks.
    pub(crate) checksums: Option<&'a Checksums>,
    /// First byte in the file.
    pub(crate) start: u64,
    /// The destination.
    pub(crate) to: &'a mut [u8],
    /// The band before which it is fetched.
    pub(crate) before: usize,
    /// The array, for messages.
    pub(crate) name: &'a str,
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
    state: Mutex<State<'a>>,
    changed: Condvar,
    budget_bytes: u64,
}

struct State<'a> {
    slots: Vec<Slot>,
    /// How many bands still need each extent.
    n_users: Vec<usize>,
    next: usize,
    /// Extents before this one are needed by a band that waits.
    urgent: usize,
    held_bytes: u64,
    direct: VecDeque<Direct<'a>>,
    outcome: Result<()>,
    is_stopped: bool,
}

enum Slot {
    Waiting,
    Fetching,
    Ready(Arc<Vec<u8>>),
    Done,
}

enum Job<'a> {
    Extent(u32),
    Direct(Direct<'a>),
}

impl<'a> Window<'a> {
    pub(crate) fn new(plan: &'a Plan<'a>, extents: &'a Extents, direct: Vec<Direct<'a>>) -> Self {
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
        Self {
            plan,
            extents,
            of_sources,
            state: Mutex::new(State {
                slots: extents.in_order.iter().map(|_| Slot::Waiting).collect(),
                n_users,
                next: 0,
                urgent: 0,
                held_bytes: 0,
                direct: direct.into(),
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
        let n_jobs = self.extents.in_order.len() + self.lock().direct.len();
        let value = std::thread::scope(|scope| {
            let mut n_started = 0;
            for number in 0..N_REQUESTS.min(n_jobs) {
                let thread = std::thread::Builder::new().name(format!("reshard-fetch-{number}"));
                let fetch = || self.fetch(control);
                n_started += usize::from(thread.spawn_scoped(scope, fetch).is_ok());
            }
            if n_started == 0 {
                // Without a thread, bands read what they need themselves.
                self.lock().slots.fill_with(|| Slot::Done);
                self.fetch(control);
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

    /// Fetches until nothing is left.
    fn fetch(&self, control: &Control) {
        while let Some(job) = self.next_job() {
            let done = match job {
                Job::Extent(number) => self.fetch_extent(number, control),
                Job::Direct(mut run) => fetch_direct(&mut run, control),
            };
            if let Err(error) = done.and_then(|()| control.check()) {
                self.stop(Err(error));
            }
        }
    }

    fn next_job(&self) -> Option<Job<'a>> {
        let mut state = self.lock();
        loop {
            if state.is_stopped {
                return None;
            }
            let next = state.next;
            let extent = self.extents.in_order.get(next);
            let is_due =
                |run: &Direct<'_>| extent.is_none_or(|extent| run.before <= extent.first_part);
            if state.direct.front().is_some_and(is_due) {
                return state.direct.pop_front().map(Job::Direct);
            }
            let extent = extent?;
            if !matches!(state.slots[next], Slot::Waiting) {
                state.next += 1;
                continue;
            }
            let n_bytes = extent.n_bytes();
            if next < state.urgent
                || state.held_bytes == 0
                || state.held_bytes + n_bytes <= self.budget_bytes
            {
                state.next += 1;
                state.held_bytes += n_bytes;
                state.slots[next] = Slot::Fetching;
                return Some(Job::Extent(next as u32));
            }
            // Runs for the destination need no memory.
            if let Some(run) = state.direct.pop_front() {
                return Some(Job::Direct(run));
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn fetch_extent(&self, number: u32, control: &Control) -> Result<()> {
        let extent = &self.extents.in_order[number as usize];
        let PlanSource::File(_, file) = &self.plan.sources[extent.source as usize] else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(extent.n_bytes() as usize)
            .map_err(|_| {
                let error = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
                Error::io(
                    "cannot allocate memory for a part of",
                    file.source().path(),
                    &error,
                )
            })?;
        bytes.resize(extent.n_bytes() as usize, 0);
        file.source().read_at(extent.start, &mut bytes)?;
        control.fetched(extent.n_bytes());
        self.lock().slots[number as usize] = Slot::Ready(Arc::new(bytes));
        self.changed.notify_all();
        Ok(())
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
            let number = number as usize;
            state.n_users[number] -= 1;
            if state.n_users[number] == 0 {
                state.slots[number] = Slot::Done;
                let n_bytes = self.extents.in_order[number].n_bytes();
                state.held_bytes = state.held_bytes.saturating_sub(n_bytes);
            }
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
            let extent = extent(number);
            let (true, Slot::Ready(bytes)) = (extent.start <= at, &state.slots[number as usize])
            else {
                return false;
            };
            let until = extent.end.min(end);
            parts.push((
                Arc::clone(bytes),
                (at - extent.start) as usize..(until - extent.start) as usize,
            ));
            at = until;
        }
        drop(state);
        if at < end {
            return false;
        }
        let mut rest = to;
        for (bytes, range) in parts {
            let (here, after) = rest.split_at_mut(range.len());
            here.copy_from_slice(&bytes[range]);
            rest = after;
        }
        true
    }
}

/// Whether a source is on another host.
pub(crate) fn has_remote(plan: &Plan<'_>) -> bool {
    let is_remote = |source: &PlanSource| matches!(source, PlanSource::File(_, file) if file.source().is_remote());
    plan.sources.iter().any(is_remote)
}

/// Adds the ranges of remote sources that a part of the work reads. Large gaps are left out.
pub(crate) fn add_wanted(
    plan: &Plan<'_>,
    part: usize,
    pieces: &mut dyn Iterator<Item = Piece<'_>>,
    rules: Rules,
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
                add_box(at, unit_bytes, dims, (part, rules.gap_bytes), wanted);
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
    (part, gap_bytes): (usize, u64),
    wanted: &mut Vec<Wanted>,
) {
    if let Some((widest, inner)) = skips_gaps(dims, unit_bytes, gap_bytes) {
        for k in 0..dims[widest].len {
            let start = start + k * dims[widest].src * unit_bytes;
            add_box(
                (copy_op, start),
                unit_bytes,
                &inner,
                (part, gap_bytes),
                wanted,
            );
        }
        return;
    }
    let end = start + src_span(dims) * unit_bytes;
    wanted.push(Wanted {
        source: copy_op.source,
        start,
        end,
        part,
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

fn fetch_direct(run: &mut Direct<'_>, control: &Control) -> Result<()> {
    let mut fetch = || {
        run.file.source().read_at(run.start, run.to)?;
        control.fetched(run.to.len() as u64);
        if let Some(checksums) = run.checksums {
            verify_chunks(
                run.file,
                checksums,
                checksums.chunks_over(run.start, 1).start,
                run.to,
            )?;
        }
        control.advance(run.to.len() as u64);
        Ok(())
    };
    fetch().map_err(|error: Error| error.key(run.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::memory::Stores;
    use crate::bytes::team::Team;
    use crate::error::Kind;
    use crate::files::shard_file::Format;
    use crate::files::source::{Ranges, Source};
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
        n_requests: AtomicU64,
    }

    impl Ranges for Remote {
        fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
            let number = self.n_requests.fetch_add(1, Ordering::SeqCst);
            if number == self.fails_at {
                return Err(Error::new(Kind::Io, "as intended"));
            }
            std::thread::sleep(Duration::from_millis(1));
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

    /// A file with a matrix, a long run and many small tensors, and an index of it as an object.
    fn remote(folder: &Path, fails_at: u64, summed: bool) -> (Index, Requests, u64) {
        let path = folder.join("model.safetensors");
        let data: Vec<u8> = (0..40 << 20_u32)
            .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let matrix = [2048_u64, 4096];
        let (run, small) = ([20_u64 << 20], [1000_u64]);
        let names: Vec<String> = (0..50).map(|i| format!("small.{i:02}")).collect();
        let tensor = |name, shape, from: usize| MemoryTensor {
            name,
            dtype: Dtype::U8,
            shape,
            bytes: &data[from..],
            strides_bytes: if shape == matrix {
                vec![4096, 1]
            } else {
                vec![1]
            },
        };
        let mut tensors = vec![
            tensor("matrix", &matrix[..], 0),
            tensor("run", &run[..], 9 << 20),
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
                    n_requests: AtomicU64::new(0),
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

    fn filled(index: &Index, verify: bool, control: &Control) -> Result<Vec<Vec<u8>>> {
        let plan = index.plan(&request(), None, verify)?;
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
        for summed in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let (index, requests, n_bytes) = remote(folder.path(), u64::MAX, summed);
            let mut local = Index::new();
            let file = local.add_file(
                folder.path().join("model.safetensors"),
                true,
                crate::source::Method::Read,
            );
            local.add_whole_file(file).unwrap();
            requests.lock().unwrap().clear();
            let control = Control::default();
            let found = filled(&index, summed, &control).unwrap();
            assert!(found == filled(&local, false, &Control::default()).unwrap());
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

    #[test]
    fn the_first_failure_ends_the_run() {
        for fails_at in [2, 4] {
            let folder = tempfile::tempdir().unwrap();
            let (index, ..) = remote(folder.path(), fails_at, true);
            let error = filled(&index, true, &Control::default()).unwrap_err();
            assert!(error.message().contains("as intended"), "{error}");
        }
    }

    #[test]
    fn a_cancelled_run_ends() {
        let folder = tempfile::tempdir().unwrap();
        let (index, ..) = remote(folder.path(), u64::MAX, true);
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
        let (index, requests, n_bytes) = remote(folder.path(), u64::MAX, true);
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
        let (index, ..) = remote(folder.path(), u64::MAX, true);
        let plan = index.plan(&request(), None, true).unwrap();
        let n_parts = 20;
        let wanted: Vec<_> = (0..n_parts as u64)
            .map(|i| Wanted {
                source: 0,
                start: i << 20,
                end: (i + 1) << 20,
                part: i as usize,
            })
            .collect();
        let rules = Rules {
            gap_bytes: 1,
            request_bytes: 1 << 20,
        };
        let extents = plan_extents(&plan, &Checks::new(&plan), &wanted, n_parts, rules);
        let mut window = Window::new(&plan, &extents, Vec::new());
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
