//! The threads that execute one piece of work: the calling thread, and those of a pool.
//!
//! Where work consists of parts, the calling thread executes some of them instead of waiting: it runs already, while a thread
//! that is woken starts later, and often on the processor of the thread that wakes it.

use crate::error::Result;
use rayon::{Scope, ThreadPool};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the calling thread does something else meanwhile.
const TICK: Duration = Duration::from_millis(50);

/// The calling thread and a pool. For work in parts the calling thread takes the place of one thread of the pool.
pub struct Team<'a> {
    pool: Option<&'a ThreadPool>,
    tick: &'a dyn Fn(),
}

impl<'a> Team<'a> {
    /// The calling thread and a pool. The calling thread calls `tick` every 50 ms while it waits, and between two parts
    /// if 50 ms have passed.
    pub fn new(pool: &'a ThreadPool, tick: &'a dyn Fn()) -> Self {
        Self {
            pool: Some(pool),
            tick,
        }
    }

    /// The calling thread and the current rayon pool.
    pub fn current() -> Self {
        Self {
            pool: None,
            tick: &|| (),
        }
    }

    /// Runs work that uses the current rayon pool.
    pub fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        if self.pool.is_none() {
            return work();
        }
        let mut result = None;
        // The scope waits for the work, and passes on a panic of it.
        self.scope(|scope, _| {
            let (sender, receiver) = channel();
            let result = &mut result;
            scope.spawn(move |_| {
                // Dropping the sender wakes the waiting thread, also after a panic.
                let _sender = sender;
                *result = Some(work());
            });
            self.wait(&receiver);
        });
        result.expect("work that ends without a panic has a result")
    }

    /// Calls `work` for each part. Parts are begun in their order, and none is begun after an error.
    ///
    /// # Errors
    /// The first error of `work`.
    pub(crate) fn for_each<T: Send>(
        &self,
        parts: Vec<T>,
        work: impl Fn(usize, T) -> Result<()> + Sync,
    ) -> Result<()> {
        let n_parts = parts.len();
        let parts = Mutex::new(parts.into_iter().enumerate());
        let outcome = Mutex::new(Ok(()));
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        let is_ok = || {
            let outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            outcome.is_ok()
        };
        let work_on_parts = |after_each: &dyn Fn()| {
            while is_ok()
                && let Some((number, part)) = next()
            {
                if let Err(error) = work(number, part) {
                    let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
                    if outcome.is_ok() {
                        *outcome = Err(error);
                    }
                }
                after_each();
            }
        };
        self.scope(|scope, n_threads| {
            let (sender, receiver) = channel();
            for _ in 1..n_threads.min(n_parts) {
                let (sender, work_on_parts) = (sender.clone(), &work_on_parts);
                scope.spawn(move |_| {
                    let _sender = sender;
                    work_on_parts(&|| ());
                });
            }
            drop(sender);
            let due = Cell::new(Instant::now() + TICK);
            work_on_parts(&|| {
                if Instant::now() >= due.get() {
                    (self.tick)();
                    due.set(Instant::now() + TICK);
                }
            });
            self.wait(&receiver);
        });
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn scope<'scope, R>(&self, function: impl FnOnce(&Scope<'scope>, usize) -> R) -> R {
        match self.pool {
            Some(pool) => pool.in_place_scope(|scope| function(scope, pool.current_num_threads())),
            None => rayon::in_place_scope(|scope| function(scope, rayon::current_num_threads())),
        }
    }

    /// Waits until all senders are dropped.
    fn wait(&self, receiver: &Receiver<()>) {
        while receiver.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            (self.tick)();
        }
    }
}

/// Calls `work` for the numbers from 0 on, on threads of its own: for work that waits for other hosts. Returns the results in
/// the order of the numbers. None is begun after an error.
///
/// # Errors
/// The first error of `work`.
pub(crate) fn on_threads<T: Send>(
    n_threads: usize,
    n: u64,
    work: impl Fn(u64) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicU64::new(0);
    let outcome = Mutex::new(Ok(Vec::new()));
    let run = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= n {
                return;
            }
            let done = work(number);
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            match (&mut *outcome, done) {
                (Ok(results), Ok(result)) => results.push((number, result)),
                (Ok(_), Err(error)) => {
                    *outcome = Err(error);
                    next.store(n, Ordering::Relaxed);
                }
                (Err(_), _) => return,
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..n_threads.min(n as usize) {
            // Where the system refuses threads, those that exist do all the work.
            if std::thread::Builder::new()
                .spawn_scoped(scope, run)
                .is_err()
            {
                break;
            }
        }
        run();
    });
    let mut results = outcome
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)?;
    results.sort_unstable_by_key(|(number, _)| *number);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Kind};
    use std::collections::HashSet;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;

    fn pool(n_threads: usize) -> ThreadPool {
        let builder = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
        builder.build().unwrap()
    }

    #[test]
    fn the_calling_thread_works_beside_the_pool() {
        let pool = pool(3);
        let (barrier, threads) = (Barrier::new(3), Mutex::new(HashSet::new()));
        let team = Team::new(&pool, &|| ());
        // Three parts that wait for each other need three threads.
        let numbers = vec![10, 11, 12];
        team.for_each(numbers, |number, part| {
            assert_eq!(part, 10 + number);
            threads.lock().unwrap().insert(std::thread::current().id());
            barrier.wait();
            Ok(())
        })
        .unwrap();
        let threads = threads.into_inner().unwrap();
        assert_eq!(threads.len(), 3);
        assert!(threads.contains(&std::thread::current().id()));
    }

    #[test]
    fn no_part_is_begun_after_an_error() {
        for n_threads in [1, 4] {
            let pool = pool(n_threads);
            let n_begun = AtomicUsize::new(0);
            let error = Team::new(&pool, &|| ())
                .for_each((0..1000).collect(), |_, part: usize| {
                    n_begun.fetch_add(1, Ordering::SeqCst);
                    if part == 20 {
                        return Err(Error::new(Kind::Damaged, "part 20"));
                    }
                    // So long that few are begun meanwhile also if the thread with the error does not go on for seconds.
                    std::thread::sleep(Duration::from_millis(if part > 20 { 100 } else { 0 }));
                    Ok(())
                })
                .unwrap_err();
            assert_eq!(error.to_string(), "part 20");
            let n_begun = n_begun.into_inner();
            assert!((21..=20 + 100 * n_threads).contains(&n_begun), "{n_begun}");
        }
    }

    #[test]
    fn the_calling_thread_ticks_while_it_works_and_while_it_waits() {
        let pool = pool(2);
        let n_ticks = AtomicUsize::new(0);
        let tick = || {
            n_ticks.fetch_add(1, Ordering::SeqCst);
        };
        let wait_for = |n| {
            let begun = Instant::now();
            while n_ticks.load(Ordering::SeqCst) < n {
                assert!(begun.elapsed() < 1000 * TICK, "no more than {n_ticks:?}");
                std::thread::sleep(TICK / 10);
            }
        };
        let team = Team::new(&pool, &tick);
        let caller = std::thread::current().id();
        assert_eq!(
            team.install(|| {
                wait_for(1);
                7
            }),
            7
        );
        n_ticks.store(0, Ordering::SeqCst);
        let barrier = Barrier::new(2);
        let part = |_, ()| {
            barrier.wait();
            if std::thread::current().id() == caller {
                std::thread::sleep(2 * TICK);
            } else {
                wait_for(3); // one after the part of the caller, the others while it waits
            }
            Ok(())
        };
        team.for_each(vec![(), ()], part).unwrap();
    }

    #[test]
    fn results_of_threads_are_in_order_and_the_first_error_ends_the_work() {
        for n_threads in [1, 5] {
            let squares = on_threads(n_threads, 100, |i| {
                std::thread::sleep(Duration::from_micros(100 - i));
                Ok(i * i)
            });
            assert_eq!(
                squares.unwrap(),
                (0..100).map(|i| i * i).collect::<Vec<_>>()
            );
            let n_begun = AtomicUsize::new(0);
            let failed = on_threads(n_threads, 1000, |i| {
                n_begun.fetch_add(1, Ordering::SeqCst);
                if i < 7 {
                    Ok(i)
                } else {
                    Err(Error::new(Kind::Io, "as intended"))
                }
            });
            assert_eq!(failed.unwrap_err().kind(), Kind::Io);
            assert!(n_begun.into_inner() <= 7 + n_threads);
        }
        assert_eq!(on_threads(3, 0, |_| Ok(1)).unwrap(), Vec::<i32>::new());
    }

    #[test]
    fn a_panic_of_the_work_reaches_the_caller() {
        let pool = pool(2);
        let team = Team::new(&pool, &|| ());
        let panics = |function: &dyn Fn()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(function)).is_err()
        };
        assert!(panics(&|| team.install(|| panic!("as intended"))));
        assert!(panics(&|| {
            let _ = team.for_each(vec![0, 1, 2], |_, _| panic!("as intended"));
        }));
        assert_eq!(team.install(|| 1), 1);
    }
}
