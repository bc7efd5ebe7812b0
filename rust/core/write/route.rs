//! Whether a file that need not be durable is written into the page cache or past it.
//!
//! The page cache is several times as fast as a disk where memory is free. It is slower where memory is not: where the
//! host of a virtual machine took free memory back, or where too many pages wait for the disk. This changes while a
//! file is written. So both routes are measured on pieces that are written anyway:
//!
//! ```text
//! write 16 MiB into the page cache, then 32 MiB past it
//! then take the route with less time per byte, and measure it again every 32 MiB
//! past the page cache: try it again with 16 MiB after 256 MiB, and if it is slow, after twice as many, and so on
//! ```
//!
//! One piece at a time is written into the page cache: file systems do not write two parts of a file there at the same
//! time, and a thread that waits for its turn in the system uses a processor. One route is in use at a time: a file
//! system lets writes into the page cache wait until direct writes of the same file have ended. The time is that in which
//! at least one piece was being written.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Bytes of the first measurement of each route. A disk is measured with its queue full.
const FIRST_BYTES: [u64; 2] = [16 * MIB, 32 * MIB];
/// Bytes of each later measurement.
const WINDOW_BYTES: u64 = 32 * MIB;
/// Bytes past the page cache before it is tried again: at first, and at most.
const TRIAL_BYTES: [u64; 2] = [256 * MIB, 4096 * MIB];

/// How a piece reaches its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Into the page cache.
    PageCache = 0,
    /// Past it, with `O_DIRECT`, where the file system supports that.
    Direct = 1,
}

impl Route {
    fn other(self) -> Self {
        match self {
            Self::PageCache => Self::Direct,
            Self::Direct => Self::PageCache,
        }
    }
}

/// Chooses the route of each piece of files that are written one after the other.
#[derive(Debug)]
pub(crate) struct Routes {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    route: Route,
    n_writing: usize,
    /// The other route is to be taken as soon as no piece is being written.
    changes: bool,
    /// Until when the time is counted, while pieces are being written.
    since: Instant,
    measured: Measured,
}

/// What is known of both routes.
#[derive(Debug)]
struct Measured {
    /// Of the current measurement.
    time: Duration,
    n_bytes: u64,
    /// Seconds per byte, by route.
    costs: [Option<f64>; 2],
    /// Bytes past the page cache since it was tried, and how many there must be before it is tried again.
    n_past: u64,
    n_until_trial: u64,
}

impl Default for Routes {
    fn default() -> Self {
        let measured = Measured {
            time: Duration::ZERO,
            n_bytes: 0,
            costs: [None, None],
            n_past: 0,
            n_until_trial: TRIAL_BYTES[0],
        };
        let state = State {
            route: Route::PageCache,
            n_writing: 0,
            changes: false,
            since: Instant::now(),
            measured,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }
}

impl Routes {
    /// Writes a piece with `write`, when its route is free.
    ///
    /// Args:
    ///     `n_bytes`: of the piece.
    ///     `write`: writes it by the route that it is given.
    pub(crate) fn write<T>(&self, n_bytes: u64, write: impl FnOnce(Route) -> T) -> T {
        let route = self.begin();
        let result = write(route);
        self.end(n_bytes);
        result
    }

    fn begin(&self) -> Route {
        let must_wait = |state: &mut State| {
            state.n_writing > 0 && (state.changes || state.route == Route::PageCache)
        };
        let mut state = self
            .changed
            .wait_while(self.lock(), must_wait)
            .unwrap_or_else(PoisonError::into_inner);
        if state.changes {
            state.route = state.route.other();
            state.changes = false;
        }
        if state.n_writing == 0 {
            state.since = Instant::now();
        }
        state.n_writing += 1;
        state.route
    }

    fn end(&self, n_bytes: u64) {
        let mut state = self.lock();
        let now = Instant::now();
        let time = now - state.since;
        state.since = now;
        state.n_writing -= 1;
        let route = state.route;
        if !state.changes {
            state.changes = state.measured.add(route, time, n_bytes) != route;
        }
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Measured {
    /// Adds a piece that was written by a route, and returns the route of the next ones.
    fn add(&mut self, route: Route, time: Duration, n_bytes: u64) -> Route {
        self.time += time;
        self.n_bytes += n_bytes;
        if route == Route::Direct {
            self.n_past += n_bytes;
        }
        let known = self.costs[route as usize];
        let expected = match known {
            Some(_) if route == Route::Direct || self.n_past == 0 => WINDOW_BYTES,
            _ => FIRST_BYTES[route as usize],
        };
        if self.n_bytes < expected {
            return route;
        }
        // Exact: the bytes of one measurement fit.
        #[expect(clippy::cast_precision_loss)]
        let cost = self.time.as_secs_f64() / self.n_bytes as f64;
        (self.time, self.n_bytes) = (Duration::ZERO, 0);
        let is_trial = route == Route::PageCache && self.n_past > 0;
        // One slow measurement may be due to another process.
        let smoothed = known
            .filter(|_| !is_trial)
            .map_or(cost, |old| f64::midpoint(old, cost));
        self.costs[route as usize] = Some(smoothed);
        let [Some(cached), Some(direct)] = self.costs else {
            return route.other();
        };
        let next = if cached <= direct {
            Route::PageCache
        } else {
            Route::Direct
        };
        match (route, next) {
            (Route::PageCache, Route::PageCache) => {
                self.n_past = 0;
                self.n_until_trial = TRIAL_BYTES[0];
            }
            (Route::PageCache, Route::Direct) => {
                if is_trial {
                    self.n_until_trial = (2 * self.n_until_trial).min(TRIAL_BYTES[1]);
                }
                self.n_past = 0;
            }
            (Route::Direct, Route::Direct) if self.n_past >= self.n_until_trial => {
                return Route::PageCache;
            }
            (Route::Direct, _) => {}
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 4 * MIB;

    /// Adds pieces one after the other; `costs` are milliseconds of a piece by route. Returns how many went past the cache.
    fn written(routes: &Routes, n: u64, costs: [u64; 2]) -> u64 {
        let mut n_direct = 0;
        let mut route = routes.lock().route;
        for _ in 0..n {
            n_direct += route as u64;
            let time = Duration::from_millis(costs[route as usize]);
            route = routes.lock().measured.add(route, time, PIECE);
        }
        routes.lock().route = route;
        n_direct
    }

    #[test]
    fn takes_the_fastest_route() {
        assert_eq!(written(&Routes::default(), 1000, [1, 9]), 8);
        let n = written(&Routes::default(), 1000, [9, 1]);
        assert!((970..=996).contains(&n), "{n}");
    }

    #[test]
    fn follows_a_change() {
        let routes = Routes::default();
        written(&routes, 100, [1, 9]);
        let n = written(&routes, 1000, [20, 9]);
        assert!((930..1000).contains(&n), "the disk is faster now: {n}");
        written(&routes, 1200, [1, 9]);
        let n = written(&routes, 1000, [1, 9]);
        assert_eq!(n, 0, "the page cache is faster again");
    }

    #[test]
    fn uses_one_route_at_a_time() {
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        let (routes, writing, most) = (
            Routes::default(),
            [const { AtomicUsize::new(0) }; 2],
            AtomicUsize::new(0),
        );
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        routes.write(PIECE, |route| {
                            let n = writing[route as usize].fetch_add(1, SeqCst) + 1;
                            assert_eq!(writing[route.other() as usize].load(SeqCst), 0);
                            if route == Route::PageCache {
                                most.fetch_max(n, SeqCst);
                                // Slow, so that both routes are taken.
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            std::thread::sleep(Duration::from_micros(50));
                            writing[route as usize].fetch_sub(1, SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(most.into_inner(), 1);
    }
}
