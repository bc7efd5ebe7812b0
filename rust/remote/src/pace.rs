//! How long the last requests for ranges of a bucket took: which one is late, and may be sent a second time; which gaps
//! take less time than another request; and how many requests at once are fastest.
//!
//! A request takes the time `L` before its first byte, and then a connection has the rate `B`. To leave a gap out costs
//! another request, so gaps of less than `L x B` are read. `L` is the lower quartile of the last requests, as many wait
//! for each other or for a connection; `B` is the median.
//!
//! The number of requests at once begins with 32. After as many requests, the rate of all together is compared with that of
//! another number: more are kept if they are faster by a tenth, and fewer if they are not slower. Then the number stays for
//! some time; also if so many are never open at once. An answer that says that there were too many requests halves it.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "rates are estimates, and positive"
)]

use crate::client::READ_TIMEOUT;
use futures_util::future::{Either, select};
use reshard_core::Result;
use reshard_core::source::{Link, Part, copy_to_parts, span_of};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
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

/// The bytes of a request from which its rate counts.
const MIN_RATED_BYTES: u64 = 1 << 20;
/// The rate of a connection, in bytes a second, until it is known.
const USUAL_RATE: f64 = 90e6;
const MIN_GAP_BYTES: f64 = (256_u32 << 10) as f64;
/// No request has more.
const MAX_GAP_BYTES: f64 = (8_u32 << 20) as f64;
const MIN_AT_ONCE: usize = 4;
const MAX_AT_ONCE_OF_ALL: usize = 64;
/// More requests at once stay if the rate grows by this factor.
const GROWS: f64 = 1.1;
/// Fewer stay if the rate does not fall by more.
const HOLDS: f64 = 0.95;
/// Rounds after which another number is tried again.
const N_SETTLED: u32 = 16;
/// More requests at once are tried for so many times their number. Memory can be too small for them.
const N_TRIED: usize = 2;
/// Many requests get the same answer at about the same time: it counts once in this time.
const ONE_ANSWER: Duration = Duration::from_secs(1);

static GAP_BYTES: AtomicU64 = AtomicU64::new(0);
static N_AT_ONCE: AtomicU64 = AtomicU64::new(0);

/// The gap and the number of requests at once by which requests were planned last in this process; 0: none were.
pub fn last_link() -> (u64, u64) {
    (
        GAP_BYTES.load(Ordering::Relaxed),
        N_AT_ONCE.load(Ordering::Relaxed),
    )
}

/// The last values of something that is measured.
#[derive(Debug, Default)]
struct Last(VecDeque<f64>);

impl Last {
    fn add(&mut self, value: f64) {
        if self.0.len() == N_KNOWN {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    /// The value below which a part of the others lie.
    fn at(&self, part: f64) -> Option<f64> {
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get((sorted.len() as f64 * part) as usize).copied()
    }
}

/// What the rate of requests and answers is known by.
#[derive(Debug, Default)]
struct Speed {
    before_first_byte: Last,
    rates: Last,
}

impl Speed {
    /// The gap that takes as long as a request.
    fn gap_bytes(&self) -> u64 {
        let Some(seconds) = self.before_first_byte.at(0.25) else {
            return Link::default().gap_bytes;
        };
        let rate = self.rates.at(0.5).unwrap_or(USUAL_RATE);
        (seconds * rate).clamp(MIN_GAP_BYTES, MAX_GAP_BYTES) as u64
    }
}

/// How many requests are made at once.
#[derive(Debug)]
struct Width {
    n: usize,
    round: Option<Round>,
    /// The number that is compared with, and its rate.
    other: Option<(usize, f64)>,
    n_settled: u32,
    /// How many requests ended while there were much fewer.
    n_apart: usize,
    throttled: Option<Duration>,
}

/// As many requests as there are at once: when it began, how many bytes had arrived by then, and how many requests ended.
#[derive(Debug, Clone, Copy)]
struct Round {
    begun: Duration,
    n_bytes: u64,
    n_ended: usize,
}

impl Default for Width {
    fn default() -> Self {
        Self {
            n: Link::default().n_at_once,
            round: None,
            other: None,
            n_settled: 0,
            n_apart: 0,
            throttled: None,
        }
    }
}

impl Width {
    /// Notes that a request begins or ends: at a time, when so many bytes had arrived in all, and so many requests are open.
    fn note(&mut self, now: Duration, n_bytes: u64, n_open: usize, is_end: bool) {
        if 4 * n_open < 3 * self.n {
            // Much fewer requests at once say nothing of the number.
            self.round = None;
            self.n_apart += usize::from(is_end);
            if let Some((other, _)) = self.other
                && self.n > other
                && self.n_apart >= N_TRIED * self.n
            {
                (self.n, self.other, self.n_settled) = (other, None, N_SETTLED);
            }
            return;
        }
        self.n_apart = 0;
        let round = self.round.get_or_insert(Round {
            begun: now,
            n_bytes,
            n_ended: 0,
        });
        round.n_ended += usize::from(is_end);
        if round.n_ended >= self.n {
            let seconds = now.saturating_sub(round.begun).as_secs_f64();
            let rate = n_bytes.saturating_sub(round.n_bytes) as f64 / seconds.max(1e-6);
            self.round = None;
            self.judge(rate);
        }
    }

    fn judge(&mut self, rate: f64) {
        if self.n_settled > 0 {
            self.n_settled -= 1;
            return;
        }
        let more = |n: usize| (n * 3 / 2).min(MAX_AT_ONCE_OF_ALL);
        let fewer = |n: usize| (n * 2 / 3).max(MIN_AT_ONCE);
        let (n, other) = match self.other {
            None if more(self.n) > self.n => (more(self.n), Some((self.n, rate))),
            None => (fewer(self.n), Some((self.n, rate))),
            Some((other, before)) if self.n > other => {
                if rate < GROWS * before {
                    (fewer(other), Some((other, before)))
                } else if more(self.n) > self.n {
                    (more(self.n), Some((self.n, rate)))
                } else {
                    (self.n, None)
                }
            }
            Some((_, before)) if rate >= HOLDS * before => {
                let n = fewer(self.n);
                (n, (n < self.n).then(|| (self.n, rate.max(before))))
            }
            Some((other, _)) => (other, None),
        };
        (self.n, self.other) = (n, other);
        if self.other.is_none() {
            self.n_settled = N_SETTLED;
        }
    }

    /// Notes an answer that says that there were too many requests.
    fn throttle(&mut self, now: Duration) {
        let is_new = self
            .throttled
            .is_none_or(|then| now.saturating_sub(then) >= ONE_ANSWER);
        if is_new {
            self.throttled = Some(now);
            self.n = (self.n / 2).max(MIN_AT_ONCE);
            (self.round, self.other, self.n_settled) = (None, None, N_SETTLED);
        }
    }
}

/// How long a large body is waited for, at first and at most. The answer comes after the body, however slow the network is.
const MIN_SEND_FOR: Duration = READ_TIMEOUT;
const MAX_SEND_FOR: Duration = Duration::from_secs(480);

/// The requests of a client.
#[derive(Debug)]
pub(crate) struct Pace {
    begun: Instant,
    speed: Mutex<Speed>,
    width: Mutex<Width>,
    n_open: AtomicUsize,
    n_arrived: AtomicU64,
    known: Mutex<VecDeque<(Duration, u64)>>,
    n_first: AtomicU64,
    n_second: AtomicU64,
    n_at_once: AtomicU64,
    /// What a body took that was sent last, in nanoseconds for each of its bytes.
    sent_ns: AtomicU64,
}

/// A second request; when it is dropped, another one may be sent.
struct Permit<'a>(&'a Pace);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.n_at_once.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            speed: Mutex::default(),
            width: Mutex::default(),
            n_open: AtomicUsize::new(0),
            n_arrived: AtomicU64::new(0),
            known: Mutex::default(),
            n_first: AtomicU64::new(0),
            n_second: AtomicU64::new(0),
            n_at_once: AtomicU64::new(0),
            sent_ns: AtomicU64::new(0),
        }
    }
}

/// A request that is open until it is dropped.
struct Open<'a>(&'a Pace);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let n_open = self.0.n_open.fetch_sub(1, Ordering::Relaxed);
        self.0.note_width(n_open, true);
    }
}

impl Pace {
    /// How requests are planned.
    pub(crate) fn link(&self) -> Link {
        let speed = self.speed.lock().unwrap_or_else(PoisonError::into_inner);
        let gap_bytes = speed.gap_bytes();
        drop(speed);
        let n_at_once = self.width().n;
        GAP_BYTES.store(gap_bytes, Ordering::Relaxed);
        N_AT_ONCE.store(n_at_once as u64, Ordering::Relaxed);
        Link {
            gap_bytes,
            n_at_once,
        }
    }

    /// Notes how long a request took before its first byte.
    pub(crate) fn note_answer(&self, took: Duration) {
        let mut speed = self.speed.lock().unwrap_or_else(PoisonError::into_inner);
        speed.before_first_byte.add(took.as_secs_f64());
    }

    /// Notes how long all bytes of an answer took, after the first ones.
    pub(crate) fn note_rate(&self, took: Duration, n_bytes: u64) {
        if n_bytes >= MIN_RATED_BYTES {
            let mut speed = self.speed.lock().unwrap_or_else(PoisonError::into_inner);
            speed
                .rates
                .add(n_bytes as f64 / took.as_secs_f64().max(1e-6));
        }
    }

    /// Notes bytes that arrived.
    pub(crate) fn note_bytes(&self, n_bytes: usize) {
        self.n_arrived.fetch_add(n_bytes as u64, Ordering::Relaxed);
    }

    /// Notes an answer that says that there were too many requests.
    pub(crate) fn note_throttled(&self) {
        self.width().throttle(self.begun.elapsed());
    }

    /// How long the answer to a body of some bytes is waited for.
    pub(crate) fn send_for(&self, n_bytes: usize) -> Duration {
        let expected = self
            .sent_ns
            .load(Ordering::Relaxed)
            .saturating_mul(n_bytes as u64);
        let late = Duration::from_nanos(expected).saturating_mul(TIMES);
        late.clamp(MIN_SEND_FOR, MAX_SEND_FOR)
    }

    /// Notes how long a body of some bytes took, or for how long there was no answer.
    pub(crate) fn note_sent(&self, took: Duration, n_bytes: usize) {
        let each = took.as_nanos() / n_bytes.max(1) as u128;
        let each = u64::try_from(each).unwrap_or(u64::MAX);
        self.sent_ns.store(each, Ordering::Relaxed);
    }

    fn width(&self) -> MutexGuard<'_, Width> {
        self.width.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_width(&self, n_open: usize, is_end: bool) {
        let mut width = self.width();
        let n_arrived = self.n_arrived.load(Ordering::Relaxed);
        width.note(self.begun.elapsed(), n_arrived, n_open, is_end);
    }

    fn open(&self) -> Open<'_> {
        let n_open = self.n_open.fetch_add(1, Ordering::Relaxed) + 1;
        self.note_width(n_open, false);
        Open(self)
    }

    /// A range by one request; by two if the first one takes much longer than others did. The first answer counts.
    ///
    /// `fetch` sends a request and fills the parts. An error of one of two is no result while the other one is open.
    pub(crate) async fn in_time(
        &self,
        to: &mut [Part<'_>],
        fetch: impl AsyncFn(&mut [Part<'_>]) -> Result<()>,
    ) -> Result<()> {
        let begun = Instant::now();
        let (start, end) = span_of(to);
        let n_bytes = end - start;
        let _open = self.open();
        let done = self.fetch(to, &fetch).await;
        if done.is_ok() {
            self.note(begun.elapsed(), n_bytes);
        }
        done
    }

    async fn fetch(
        &self,
        to: &mut [Part<'_>],
        fetch: &impl AsyncFn(&mut [Part<'_>]) -> Result<()>,
    ) -> Result<()> {
        let (start, end) = span_of(to);
        let Some(patience) = self.patience(end - start) else {
            return fetch(to).await;
        };
        let mut first = Box::pin(fetch(&mut *to));
        if let Ok(done) = timeout(patience, &mut first).await {
            return done;
        }
        let Some(_permit) = self.second() else {
            return first.await;
        };
        let mut own = vec![0; (end - start) as usize];
        let mut parts = [(start, &mut own[..])];
        let second = Box::pin(fetch(&mut parts));
        let is_second = match select(first, second).await {
            Either::Left((Ok(()), _)) => false,
            Either::Left((Err(_), second)) => second.await.map(|()| true)?,
            Either::Right((Err(_), first)) => first.await.map(|()| false)?,
            Either::Right((Ok(()), _)) => true,
        };
        if is_second {
            copy_to_parts(&own, start, to);
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

    #[test]
    fn a_body_is_waited_for_as_long_as_the_last_ones_took() {
        let pace = Pace::default();
        let part = 16 << 20;
        assert_eq!(pace.send_for(part), MIN_SEND_FOR);
        for (seconds, expected) in [(30, 120), (120, 480), (480, 480), (50, 200), (1, 30)] {
            pace.note_sent(Duration::from_secs(seconds), part);
            let found = pace.send_for(part).as_secs_f64();
            assert!(
                (found - f64::from(expected)).abs() < 1.0,
                "{found} {expected}"
            );
        }
        pace.note_sent(Duration::from_secs(100), part);
        assert!(pace.send_for(part / 2) < Duration::from_secs(201));
    }

    #[test]
    fn a_gap_is_read_if_a_request_takes_longer() {
        let mut speed = Speed::default();
        assert_eq!(speed.gap_bytes(), 2 << 20);
        speed.before_first_byte.add(0.03);
        assert_eq!(speed.gap_bytes(), 2_700_000);
        speed.rates.add(200e6);
        assert_eq!(speed.gap_bytes(), 6_000_000);
        // Most of the requests wait for something else.
        for _ in 0..10 {
            speed.before_first_byte.add(0.001);
            speed.before_first_byte.add(0.5);
        }
        assert_eq!(speed.gap_bytes(), 256 << 10);
        for _ in 0..N_KNOWN {
            speed.before_first_byte.add(0.2);
        }
        assert_eq!(speed.gap_bytes(), 8 << 20);
    }

    /// The number of requests at once after some rounds at a service whose connections have the rate 1, and all together
    /// no more than `most`.
    fn settled(most: f64, n_rounds: usize) -> (usize, f64) {
        let (mut width, mut now, mut arrived) = (Width::default(), 0.0, 0.0);
        let rate = |n: usize| most.min(n as f64);
        for _ in 0..n_rounds {
            let n = width.n;
            width.note(Duration::from_secs_f64(now), arrived as u64, n, false);
            for _ in 0..n {
                now += 1000.0 / rate(n);
                arrived += 1000.0;
                width.note(Duration::from_secs_f64(now), arrived as u64, n, true);
            }
            assert!((MIN_AT_ONCE..=MAX_AT_ONCE_OF_ALL).contains(&width.n));
        }
        (width.n, rate(width.n))
    }

    #[test]
    fn a_throttled_service_gets_fewer_requests_once_for_many_answers() {
        let mut width = Width::default();
        for at in 0..5 {
            width.throttle(at * MS);
        }
        assert_eq!(width.n, 16);
        width.throttle(1500 * MS);
        assert_eq!(width.n, 8);
        for at in 2..9 {
            width.throttle(at * 2000 * MS);
        }
        assert_eq!(width.n, MIN_AT_ONCE);
    }

    #[test]
    fn more_requests_than_memory_allows_are_not_tried_for_long() {
        let mut width = Width::default();
        for at in 0..32 {
            width.note(at * MS, u64::from(at), 32, true);
        }
        assert_eq!(width.n, 48);
        for at in 32..32 + 96 {
            width.note(at * MS, u64::from(at), 32, true);
        }
        assert_eq!((width.n, width.other), (32, None));
    }

    #[test]
    fn bytes_that_are_counted_late_are_no_negative_rate() {
        let mut width = Width::default();
        width.note(MS, 1000, 32, false);
        for _ in 0..32 {
            width.note(2 * MS, 10, 32, true);
        }
        assert_eq!(width.other, Some((32, 0.0)));
    }

    #[test]
    fn requests_that_are_not_all_open_say_nothing() {
        let mut width = Width::default();
        for at in 0..1000 {
            width.note(at * MS, u64::from(at), 23, true);
        }
        assert_eq!(width.n, 32);
    }

    /// What becomes of a request: after some time it fills its buffer, or fails with a part of it filled wrongly.
    type Fate = (u32, bool);

    fn fate() -> impl Strategy<Value = Fate> {
        (0_u32..5_000, any::<bool>())
    }

    proptest! {
        #[test]
        fn as_many_requests_are_made_as_are_faster(most in 1.0..200.0_f64) {
            // A round of each number, until it stays.
            let (n, rate) = settled(most, 10);
            let best = most.min(MAX_AT_ONCE_OF_ALL as f64);
            prop_assert!(rate >= 0.85 * best, "{} at once have {} of {}", n, rate, best);
            let needed = best.max(MIN_AT_ONCE as f64);
            prop_assert!(n as f64 <= 1.6 * needed, "{} at once, where {} have all", n, needed);
        }

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
                    let (one, other) = to.split_at_mut(n_bytes / 3);
                    let mut parts = [(5, one), (5 + n_bytes as u64 / 3, other)];
                    let begun = Instant::now();
                    let is_late = pace.patience(n_bytes as u64).unwrap() <= first.0 * MS;
                    let done = pace.in_time(&mut parts, async |to: &mut [Part<'_>]| {
                        let (after, is_right) = [first, second][n_sent.fetch_add(1, Ordering::SeqCst)];
                        to[to.len() - 1].1[0] = 9;
                        sleep(after * MS).await;
                        for (_, part) in to {
                            part.fill(u8::from(is_right));
                        }
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
