//! How long the last requests for ranges of a bucket took: which one is late, and may be sent a second time.

use futures_util::future::{Either, select};
use reshard_core::Result;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The last requests that are known.
const N_KNOWN: usize = 32;
/// Fewer say nothing.
const MIN_KNOWN: usize = 8;
/// A request is late after so many times what others took.
const TIMES: u32 = 4;
/// Nothing is late before.
const MIN_PATIENCE: Duration = Duration::from_millis(500);
/// Below this size, the time of a request does not depend on it.
const SMALL_BYTES: u64 = 256 << 10;
/// Second requests at once.
const MAX_AT_ONCE: u64 = 4;
/// One second request for so many first ones, beyond the first `MAX_AT_ONCE`: a slow service gets no double load.
const N_FIRST: u64 = 20;

/// The requests of a client.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    known: Mutex<VecDeque<(Duration, u64)>>,
    n_first: AtomicU64,
    n_second: AtomicU64,
    n_at_once: AtomicU64,
}

/// A second request; when it is dropped, another one may be sent.
struct Permit<'a>(&'a Pace);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.n_at_once.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pace {
    /// A range by one request; by two if the first one takes much longer than others did. The first answer counts.
    ///
    /// `fetch` sends a request and fills the buffer. An error of one of two is no result while the other one is open.
    pub(crate) async fn in_time(
        &self,
        to: &mut [u8],
        fetch: impl AsyncFn(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let begun = Instant::now();
        let n_bytes = to.len() as u64;
        let done = self.fetch(to, &fetch).await;
        if done.is_ok() {
            self.note(begun.elapsed(), n_bytes);
        }
        done
    }

    async fn fetch(
        &self,
        to: &mut [u8],
        fetch: &impl AsyncFn(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let n_bytes = to.len();
        let Some(patience) = self.patience(n_bytes as u64) else {
            return fetch(to).await;
        };
        let mut first = Box::pin(fetch(&mut *to));
        if let Ok(done) = timeout(patience, &mut first).await {
            return done;
        }
        let Some(_permit) = self.second() else {
            return first.await;
        };
        let mut own = vec![0; n_bytes];
        let second = Box::pin(fetch(&mut own));
        let is_second = match select(first, second).await {
            Either::Left((Ok(()), _)) => false,
            Either::Left((Err(_), second)) => second.await.map(|()| true)?,
            Either::Right((Err(_), first)) => first.await.map(|()| false)?,
            Either::Right((Ok(()), _)) => true,
        };
        if is_second {
            to.copy_from_slice(&own);
        }
        Ok(())
    }

    /// Notes a request that has succeeded.
    fn note(&self, took: Duration, n_bytes: u64) {
        self.n_first.fetch_add(1, Ordering::Relaxed);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == N_KNOWN {
            known.pop_front();
        }
        known.push_back((took, n_bytes));
    }

    /// After what time a request is late; `None` if it is not known.
    fn patience(&self, n_bytes: u64) -> Option<Duration> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        patience(known.iter().copied(), n_bytes)
    }

    /// Whether a second request may be sent.
    fn second(&self) -> Option<Permit<'_>> {
        let n_allowed = MAX_AT_ONCE + self.n_first.load(Ordering::Relaxed) / N_FIRST;
        let is_free = |n: u64| (n < MAX_AT_ONCE).then_some(n + 1);
        if self.n_second.load(Ordering::Relaxed) >= n_allowed {
            return None;
        }
        let order = Ordering::Relaxed;
        self.n_at_once.fetch_update(order, order, is_free).ok()?;
        self.n_second.fetch_add(1, order);
        Some(Permit(self))
    }
}

/// After what time a request of some bytes is late, by the time and the bytes of others.
fn patience(known: impl Iterator<Item = (Duration, u64)>, n_bytes: u64) -> Option<Duration> {
    // By the median of the time for each byte: one slow answer among many does not move it.
    let mut each: Vec<f64> = known
        .map(|(took, n_bytes)| took.as_secs_f64() / size(n_bytes))
        .collect();
    if each.len() < MIN_KNOWN {
        return None;
    }
    each.sort_by(f64::total_cmp);
    let expected = each[each.len() / 2] * size(n_bytes);
    let late = Duration::try_from_secs_f64(expected * f64::from(TIMES)).ok()?;
    Some(late.max(MIN_PATIENCE))
}

/// The bytes by which the time of a request is divided. One has 8 MiB at most.
fn size(n_bytes: u64) -> f64 {
    f64::from(u32::try_from(n_bytes.max(SMALL_BYTES)).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use reshard_core::{Error, Kind};
    use std::sync::atomic::AtomicUsize;
    use tokio::runtime::Builder;
    use tokio::time::sleep;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_request_is_late_after_four_times_the_median() {
        let of = |known: &[(Duration, u64)], n_bytes| patience(known.iter().copied(), n_bytes);
        assert_eq!(of(&[(MS, 1); MIN_KNOWN - 1], 1), None);
        let mut known = vec![(1000 * MS, 8 << 20); MIN_KNOWN];
        assert_eq!(of(&known, 8 << 20), Some(4000 * MS));
        assert_eq!(of(&known, 4 << 20), Some(2000 * MS));
        assert_eq!(of(&known, 1), Some(MIN_PATIENCE));
        // Some that hang change nothing.
        known.extend([(3_600_000 * MS, 8 << 20); MIN_KNOWN - 2]);
        assert_eq!(of(&known, 8 << 20), Some(4000 * MS));
    }

    #[test]
    fn few_second_requests_are_sent_at_once_and_in_all() {
        let pace = Pace::default();
        let at_once: Vec<_> = std::iter::from_fn(|| pace.second()).collect();
        assert_eq!(at_once.len() as u64, MAX_AT_ONCE);
        drop(at_once);
        assert!(pace.second().is_none());
        for _ in 0..2 * N_FIRST {
            pace.note(MS, 1);
        }
        for _ in 0..2 {
            drop(pace.second().unwrap());
        }
        assert!(pace.second().is_none());
    }

    #[test]
    fn the_last_requests_count() {
        let pace = Pace::default();
        for took in [1000 * MS, 9000 * MS] {
            for _ in 0..N_KNOWN {
                pace.note(took, 8 << 20);
            }
        }
        assert_eq!(pace.patience(8 << 20), Some(36_000 * MS));
    }

    /// What becomes of a request: after some time it fills its buffer, or fails with a part of it filled wrongly.
    type Fate = (u32, bool);

    fn fate() -> impl Strategy<Value = Fate> {
        (0_u32..5_000, any::<bool>())
    }

    proptest! {
        #[test]
        fn the_bytes_are_right_whatever_the_requests_do(
            fates in vec((fate(), fate()), 1..40),
            n_bytes in 1_usize..64,
        ) {
            let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
            runtime.unwrap().block_on(async {
                let pace = Pace::default();
                for _ in 0..MIN_KNOWN {
                    pace.note(100 * MS, 1);
                }
                for (first, second) in fates {
                    let n_sent = AtomicUsize::new(0);
                    let mut to = vec![7; n_bytes];
                    let begun = Instant::now();
                    let is_late = pace.patience(n_bytes as u64).unwrap() <= first.0 * MS;
                    let done = pace.in_time(&mut to, async |to: &mut [u8]| {
                        let (after, is_right) = [first, second][n_sent.fetch_add(1, Ordering::SeqCst)];
                        to[0] = 9;
                        sleep(after * MS).await;
                        to.fill(u8::from(is_right));
                        let failed = || Error::new(Kind::Io, "as intended");
                        is_right.then_some(()).ok_or_else(failed)
                    });
                    let done = done.await;
                    let n_sent = n_sent.into_inner();
                    prop_assert!(n_sent == 1 || is_late);
                    let sent = &[first, second][..n_sent];
                    prop_assert_eq!(done.is_ok(), sent.iter().any(|one| one.1));
                    if done.is_ok() {
                        prop_assert_eq!(to, vec![1; n_bytes]);
                        // No longer than the first request would have taken, if that succeeds.
                        prop_assert!(!first.1 || begun.elapsed() <= first.0 * MS + 2 * MS);
                    }
                }
                Ok(())
            })?;
        }
    }
}
