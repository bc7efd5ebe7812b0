//! Execution of a plan: bands of the destination are filled in parallel.
//!
//! The destination is divided into bands of about 2 MiB, independently of tensors and files; only bands of one verified
//! run end where its chunks end. A band is a slice that one worker owns. The copies that overlap a band are restricted
//! to it, the source range of each is faulted in or read, and its strided runs are copied. A dense source range is
//! fetched at once; a range with large gaps is fetched run by run.
//!
//! ```text
//! for each band in parallel, on the calling thread and on those of a pool:
//!     for each copy that overlaps the band:
//!         for each box of the copy inside the band:      # at most 2 n - 1
//!             for each dense part of the box:             # the box, or run by run
//!                 fetch its source range; copy its runs
//!     zero the padding; cast if requested
//! ```

use crate::bytes::cast::cast;
use crate::bytes::memory::{Stores, finish_stores};
use crate::bytes::strided::restrict;
use crate::bytes::team::Team;
use crate::check::verify::{Checks, verifies_files, verify_files};
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::files::checksum::CHUNK_BYTES;
use crate::planning::extents::Rules;
use crate::planning::plan::{Array, Plan, PlanSource};
use crate::read::fetch::{BoxCopy, Faulted, Run};
use crate::read::readahead::{Piece, Readahead};
use crate::read::window::{Direct, Early, Window, add_wanted, has_remote, link_of, plan_extents};
use std::collections::BTreeMap;

const BAND_BYTES: u64 = 2 << 20;
/// Shorter runs of remote sources are copied.
const MIN_DIRECT_BYTES: u64 = 2 * CHUNK_BYTES as u64;

/// Fills one slice per array. Each slice has the size of its array in bytes.
///
/// # Errors
/// The number or the size of the slices is wrong, a source cannot be read or is damaged, or the run was cancelled.
pub fn fill(
    plan: &Plan<'_>,
    out: Vec<&mut [u8]>,
    stores: Stores,
    control: &Control,
    team: &Team<'_>,
) -> Result<()> {
    if out.len() != plan.arrays().len() {
        return Err(Error::new(
            Kind::Argument,
            format!(
                "{} buffers were given for {} arrays",
                out.len(),
                plan.arrays().len()
            ),
        ));
    }
    let checks = Checks::new(plan);
    let spans = spans(plan, out)?;
    if verifies_files(plan) {
        // Only then: a thread of the pool that is woken begins later than this one.
        team.install(|| verify_files(plan, control))?;
    }
    if has_remote(plan) {
        // On the pool, so that the calling thread handles signals while bands wait for requests.
        return team.install(|| fill_remote(plan, &checks, spans, stores, control));
    }
    let bands = split(plan, &checks, spans);
    let pieces = bands
        .iter()
        .map(|band| band.iter().map(Band::piece).collect());
    let readahead = Readahead::new(plan, &checks, pieces.collect());
    // In the order of the requests.
    team.for_each(bands, |number, band| {
        control.check()?;
        readahead.advance(number);
        let run = Run {
            plan,
            checks: &checks,
            stores,
            control,
            faulted: &Faulted::default(),
            window: None,
        };
        fill_band(run, band)
    })
}

fn fill_band(run: Run<'_>, band: Vec<Band<'_>>) -> Result<()> {
    for band in band {
        let array = band.array;
        for (start, to) in band.parts() {
            let n_bytes = to.len() as u64;
            fill_units(run, array, start, to)?;
            run.control.advance(n_bytes);
        }
    }
    finish_stores();
    Ok(())
}

/// As [`fill`], where sources are on other hosts: the ranges that the bands need are requested early.
fn fill_remote(
    plan: &Plan<'_>,
    checks: &Checks,
    spans: Vec<Span<'_>>,
    stores: Stores,
    control: &Control,
) -> Result<()> {
    let rules = Rules::of(link_of(plan), plan.n_bytes());
    let (spans, direct) = take_direct(plan, checks, spans, rules);
    let bands = split(plan, checks, spans);
    // The runs are a part of the work that comes after all bands: those begin while the runs arrive.
    let mut wanted: Vec<_> = direct.iter().map(|run| run.wanted(bands.len())).collect();
    for (number, band) in bands.iter().enumerate() {
        add_wanted(plan, number, &mut band.iter().map(Band::piece), &mut wanted);
    }
    let extents = plan_extents(plan, checks, &wanted, bands.len() + 1, rules);
    let window = Window::new(plan, &extents, rules, direct);
    window.run(control, || {
        Team::current().for_each(bands, |number, band| {
            window.wait_for(number, control)?;
            let run = Run {
                plan,
                checks,
                stores,
                control,
                faulted: &Faulted::default(),
                window: Some(&window),
            };
            fill_band(run, band)?;
            window.finish(number);
            Ok(())
        })
    })
}

/// Takes long runs of remote sources out of the spans: they are fetched into the destination.
fn take_direct<'a>(
    plan: &'a Plan<'_>,
    checks: &'a Checks,
    spans: Vec<Span<'a>>,
    rules: Rules,
) -> (Vec<Span<'a>>, Vec<Direct<'a>>) {
    let (mut rest, mut direct) = (Vec::new(), Vec::new());
    let mut taken = BTreeMap::new(); // the end of each run, by source and first byte
    for span in spans {
        let array = span.array;
        let file = array
            .contiguous()
            .map(|copy_op| (copy_op, plan.source(copy_op)));
        let (unit, n_bytes) = (array.unit_bytes(), span.to.len() as u64);
        let Some((copy_op, PlanSource::File(_, file))) = file else {
            rest.push(span);
            continue;
        };
        let checksums = checks.checksums(copy_op.source, file);
        let (start, end) = (copy_op.src_start_bytes, copy_op.src_start_bytes + n_bytes);
        let (mut first, mut last) = (start, end);
        if let Some(checksums) = checksums {
            let chunk = CHUNK_BYTES as u64;
            first = start.next_multiple_of(chunk);
            last = if end == checksums.n_bytes() {
                end
            } else {
                end / chunk * chunk
            };
        }
        let fits = array.stored == array.dtype
            && first + MIN_DIRECT_BYTES <= last
            && (first - start).is_multiple_of(unit)
            && (last - start).is_multiple_of(unit)
            // Bytes of two destinations are fetched once, and copied.
            && taken
                .range(..(copy_op.source, last))
                .next_back()
                .is_none_or(|(&(source, _), &end)| source != copy_op.source || end <= first);
        if !file.source().is_remote() || !fits {
            rest.push(span);
            continue;
        }
        taken.insert((copy_op.source, first), last);
        let (head, after) = span.to.split_at_mut((first - start) as usize);
        let (middle, tail) = after.split_at_mut((last - first) as usize);
        if !head.is_empty() {
            rest.push(Span {
                array,
                start: span.start,
                to: head,
            });
        }
        let (mut at, mut left) = (first, middle);
        while !left.is_empty() {
            // Requests end where those of other plans do, so that caches of a service serve them.
            let until = ((at / rules.request_bytes + 1) * rules.request_bytes).min(last);
            let (to, after) = left.split_at_mut((until - at) as usize);
            direct.push(Direct {
                source: copy_op.source,
                file,
                checksums,
                start: at,
                to,
                name: &array.name,
            });
            (at, left) = (until, after);
        }
        if !tail.is_empty() {
            rest.push(Span {
                array,
                start: span.start + (last - start) / unit,
                to: tail,
            });
        }
    }
    (rest, direct)
}

/// A part of the destination of an array.
struct Span<'a> {
    array: &'a Array,
    /// First unit.
    start: u64,
    to: &'a mut [u8],
}

/// One span per array that has bytes.
fn spans<'a>(plan: &'a Plan<'_>, out: Vec<&'a mut [u8]>) -> Result<Vec<Span<'a>>> {
    let arrays = plan.arrays().iter().zip(out);
    arrays
        .map(|(array, to)| {
            if to.len() as u64 == array.n_bytes() {
                return Ok(Span {
                    array,
                    start: 0,
                    to,
                });
            }
            let message = format!(
                "the buffer of `{}` has {} bytes, expected {}",
                array.name,
                to.len(),
                array.n_bytes()
            );
            Err(Error::new(Kind::Argument, message).key(&array.name))
        })
        .collect()
}

/// The bands of all spans, in their order. A band that begins in the page of the band before copies that part last.
fn split<'a>(plan: &'a Plan<'_>, checks: &Checks, spans: Vec<Span<'a>>) -> Vec<Vec<Band<'a>>> {
    let mut bands: Vec<Vec<Band<'_>>> = vec![Vec::new()];
    let mut free_bytes = BAND_BYTES;
    let mut last_byte = 0; // the address of the last byte in the last band
    for Span {
        array,
        mut start,
        to: mut rest,
    } in spans
    {
        let verified_from = verified_run(plan, checks, array);
        while !rest.is_empty() {
            let whole_units = |bytes: u64| bytes / array.unit_bytes() * array.unit_bytes();
            if rest.len() as u64 >= BAND_BYTES {
                // Two threads that fault in the same huge page wait for each other: bands of large arrays end at page
                // boundaries.
                free_bytes = BAND_BYTES - rest.as_ptr() as u64 % BAND_BYTES;
                if let Some(from) = verified_from {
                    // Bands that share a chunk would both read it: they end at most one chunk before a page boundary.
                    let at = from + start * array.unit_bytes();
                    let end = (at + free_bytes) / CHUNK_BYTES as u64 * CHUNK_BYTES as u64;
                    free_bytes = if end > at { end } else { end + BAND_BYTES } - at;
                }
                // An array that begins in the page in which the last band ends continues that band.
                let is_same_page = rest.as_ptr() as u64 / BAND_BYTES == last_byte / BAND_BYTES;
                if !is_same_page && !bands.last().is_some_and(Vec::is_empty) {
                    bands.push(Vec::new());
                }
            }
            let mut take = whole_units(free_bytes)
                .max(array.unit_bytes())
                .min(rest.len() as u64);
            if verified_from.is_some() && rest.len() as u64 - take <= CHUNK_BYTES as u64 {
                // A band of this chunk alone would begin with the page of the band before.
                take = rest.len() as u64;
            }
            let (to, after) = rest.split_at_mut(take as usize);
            last_byte = to.as_ptr() as u64 + take - 1;
            bands.last_mut().expect("never empty").push(Band {
                array,
                start,
                to,
                shares_page: verified_from.is_some() && start > 0,
            });
            rest = after;
            start += take / array.unit_bytes();
            free_bytes = free_bytes.saturating_sub(take);
            if free_bytes < array.unit_bytes() {
                bands.push(Vec::new());
                free_bytes = BAND_BYTES;
            }
        }
    }
    bands
}

struct Band<'a> {
    array: &'a Array,
    /// First unit.
    start: u64,
    to: &'a mut [u8],
    /// Whether its first chunk begins in the page of memory in which the band before begins.
    shares_page: bool,
}

impl<'a> Band<'a> {
    /// First unit and bytes of its two parts, in the order in which they are copied. A first chunk that shares a page comes
    /// last, when the thread of the band before has faulted in the page: otherwise both threads would clear one.
    fn parts(self) -> [(u64, &'a mut [u8]); 2] {
        let unit = self.array.unit_bytes();
        let n_bytes = if self.shares_page {
            self.to.len().min(CHUNK_BYTES)
        } else {
            0
        };
        let n = n_bytes as u64 / unit;
        let (head, rest) = self.to.split_at_mut((n * unit) as usize);
        [(self.start + n, rest), (self.start, head)]
    }

    fn piece(&self) -> Piece<'a> {
        let end = self.start + self.to.len() as u64 / self.array.unit_bytes();
        (self.array, self.start, end)
    }
}

/// First byte in its file of an array that is one run of a verified file.
fn verified_run(plan: &Plan<'_>, checks: &Checks, array: &Array) -> Option<u64> {
    let copy_op = array.contiguous()?;
    match plan.source(copy_op) {
        PlanSource::File(_, file) => checks.checksums(copy_op.source, file)?,
        PlanSource::Memory(_) => return None,
    };
    Some(copy_op.src_start_bytes)
}

/// Fills a byte range of an array. The range may begin and end inside an element.
pub(crate) fn fill_bytes(run: Run<'_>, array: &Array, start: u64, to: &mut [u8]) -> Result<()> {
    let unit = array.unit_bytes();
    let edge = |at: u64, to: &mut [u8]| -> Result<()> {
        let mut element = vec![0; unit as usize];
        let run = Run {
            stores: Stores::Plain,
            ..run
        };
        fill_units(run, array, at / unit, &mut element)?;
        let from = (at % unit) as usize;
        to.copy_from_slice(&element[from..from + to.len()]);
        Ok(())
    };
    let head = ((unit - start % unit) % unit).min(to.len() as u64) as usize;
    let (to_head, rest) = to.split_at_mut(head);
    if head > 0 {
        edge(start, to_head)?;
    }
    let tail = rest.len() % unit as usize;
    let (middle, to_tail) = rest.split_at_mut(rest.len() - tail);
    let at = start + head as u64;
    if tail > 0 {
        edge(at + middle.len() as u64, to_tail)?;
    }
    if middle.is_empty() {
        return Ok(());
    }
    fill_units(run, array, at / unit, middle)
}

/// Fills complete units of an array from unit `start` on.
fn fill_units(run: Run<'_>, array: &Array, start: u64, to: &mut [u8]) -> Result<()> {
    if array.stored == array.dtype {
        return fill_stored(run, array, start, to);
    }
    let n = to.len() as u64 / array.unit_bytes();
    let mut scratch = vec![0; (n * array.stored.unit().1) as usize];
    let plain = Run {
        stores: Stores::Plain,
        ..run
    };
    fill_stored(plain, array, start, &mut scratch)?;
    cast(array.stored, &scratch, array.dtype, to);
    Ok(())
}

fn fill_stored(run: Run<'_>, array: &Array, start: u64, to: &mut [u8]) -> Result<()> {
    let unit_bytes = array.stored.unit().1;
    let end = start + to.len() as u64 / unit_bytes;
    let first = array.padding.partition_point(|&(_, until)| until <= start);
    let padding = array.padding[first..].iter();
    for &(from, until) in padding.take_while(|&&(from, _)| from < end) {
        let (from, until) = (from.max(start), until.min(end));
        if from < until {
            to[((from - start) * unit_bytes) as usize..((until - start) * unit_bytes) as usize]
                .fill(0);
        }
    }
    for copy_op in array.copy_ops_over(start, end) {
        let mut copy = BoxCopy::new(run, copy_op, unit_bytes, to);
        restrict(
            &copy_op.dims,
            0,
            copy_op.dst,
            (start, end),
            &mut |dims, src, dst| copy.copy(dims, src, dst - start),
        )
        .map_err(|error| error.key(&array.name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::source::Method;
    use crate::geometry::dtype::Dtype;
    use crate::geometry::region::Region;
    use crate::planning::index::Index;
    use crate::planning::plan::MemoryTensor;
    use crate::planning::request::Request;
    use crate::write::writer::{Buffers, Options, write};

    /// Two threads that touch the same new page at the same time both clear one.
    #[test]
    fn no_two_bands_begin_with_the_same_page() {
        // The last chunk of the first array would be a band of its own; the others begin inside a page.
        let sizes = [(8 << 20) + (100 << 10), 5 << 20, 300 << 10, 9 << 20];
        let data = vec![7; 9 << 20];
        let names: Vec<_> = (0..sizes.len()).map(|i| i.to_string()).collect();
        let tensors = sizes.iter().zip(&names).map(|(n, name)| MemoryTensor {
            name,
            dtype: Dtype::U8,
            shape: std::slice::from_ref(n),
            bytes: &data,
            strides_bytes: vec![1],
        });
        let options = Options {
            metadata: Vec::new(),
            container: None,
            durable: false,
            direct: false,
            mode: 0o600,
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (control, mut buffers) = (Control::default(), Buffers::new(16 << 20).unwrap());
        let memory_plan = Plan::of_memory(tensors).unwrap();
        let checksums = write(&path, &memory_plan, &options, &mut buffers, &control).unwrap();
        let (mut index, mut request) = (Index::new(), Request::default());
        let file = index.add_file(path, false, Method::Map);
        index.set_checksums(file, checksums.checksums).unwrap();
        for (i, n) in sizes.iter().enumerate() {
            let (key, all) = (i.to_string(), Region::new(vec![0], vec![*n]).unwrap());
            index.add_whole(&key, file).unwrap();
            request.add_region(&key, &key, all);
        }
        for verify in [false, true] {
            let plan = index.plan(&request, None, verify).unwrap();
            let n_bytes = sizes.iter().sum::<u64>() as usize;
            let mut memory = vec![0; n_bytes + BAND_BYTES as usize];
            let at = memory.as_ptr().align_offset(BAND_BYTES as usize);
            let (mut out, mut rest) = (Vec::new(), &mut memory[at..at + n_bytes]);
            for n in sizes {
                let (one, after) = rest.split_at_mut(n as usize);
                out.push(one);
                rest = after;
            }
            let bands = split(&plan, &Checks::new(&plan), spans(&plan, out).unwrap());
            let mut first_pages = Vec::new();
            let mut n_split = 0;
            for band in bands.into_iter().filter(|band| !band.is_empty()) {
                let parts: Vec<_> = band.into_iter().flat_map(Band::parts).collect();
                n_split += parts.iter().map(|(_, to)| to.len()).sum::<usize>();
                let first = parts.iter().find(|(_, to)| !to.is_empty()).unwrap();
                first_pages.push(first.1.as_ptr() as u64 / BAND_BYTES);
            }
            assert_eq!(n_split, n_bytes);
            let mut distinct = first_pages.clone();
            distinct.dedup();
            assert_eq!(first_pages, distinct, "verify: {verify}");
        }
    }
}
