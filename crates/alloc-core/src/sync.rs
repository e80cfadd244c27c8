//! The locks and counters that the allocator's threads share, or loom's models of them.

use std::{
    ops::{Deref, DerefMut},
    thread,
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicUsize, Ordering},
};

#[cfg(loom)]
use loom::sync::{Mutex as RawLock, MutexGuard as RawGuard};
#[cfg(not(loom))]
use spin::mutex::{SpinMutex as RawLock, SpinMutexGuard as RawGuard};

/// A lock that is held for less time than it takes to fall asleep and be woken.
///
/// Who finds it taken looks again, ever more rarely. So nobody has to be woken, and it is given back with a plain store,
/// where the standard lock has to ask whether somebody sleeps. `docs/adr/0003-hot-path.md` compares them.
///
/// A thread that panics while it holds the lock leaves it poisoned, as it does the standard one.
pub(crate) struct ShortLock<T> {
    raw: RawLock<Guarded<T>>,
}

struct Guarded<T> {
    value: T,
    is_poisoned: bool,
}

/// The right to what a [`ShortLock`] guards.
pub(crate) struct ShortGuard<'a, T> {
    raw: RawGuard<'a, Guarded<T>>,
    /// Then a panic is no sign that something was left half done under this lock.
    was_panicking: bool,
}

/// A thread panicked while it held the lock.
#[derive(Debug)]
pub(crate) struct Poisoned;

impl<T> ShortLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { raw: RawLock::new(Guarded { value, is_poisoned: false }) }
    }

    /// Waits for the lock and takes it.
    #[inline]
    pub(crate) fn lock(&self) -> Result<ShortGuard<'_, T>, Poisoned> {
        let raw = self.acquire();
        if raw.is_poisoned {
            return Err(Poisoned);
        }
        Ok(ShortGuard { raw, was_panicking: thread::panicking() })
    }

    #[cfg(loom)]
    fn acquire(&self) -> RawGuard<'_, Guarded<T>> {
        self.raw.lock().expect("loom poisons no lock")
    }

    #[cfg(not(loom))]
    #[inline]
    fn acquire(&self) -> RawGuard<'_, Guarded<T>> {
        self.raw.try_lock().unwrap_or_else(|| self.acquire_contended())
    }

    #[cfg(not(loom))]
    #[cold]
    fn acquire_contended(&self) -> RawGuard<'_, Guarded<T>> {
        let mut look = 0;
        loop {
            pauses::before(look);
            if let Some(guard) = self.raw.try_lock() {
                return guard;
            }
            look += 1;
        }
    }
}

impl<T> Deref for ShortGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.raw.value
    }
}

impl<T> DerefMut for ShortGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.raw.value
    }
}

impl<T> Drop for ShortGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if thread::panicking() && !self.was_panicking {
            self.raw.is_poisoned = true;
        }
    }
}

/// How long a thread pauses before it looks after a lock again.
#[cfg(not(loom))]
mod pauses {
    use std::{hint, thread, time::Duration};

    /// It stays awake for so many looks, a third of a millisecond in all: who has the lock is at work.
    const LOOKS_AWAKE: u32 = 20;
    /// Each pause is twice as long as the last, up to 2 to this power. A look takes the lock away from the processor of the
    /// thread that has it: sixteen threads that looked more often were slower than with the standard lock.
    const PAUSES_LOG2_MAX: u32 = 9;
    /// After that, who has the lock is not at work: it needs a processor, perhaps this one.
    const NAP: Duration = Duration::from_micros(50);

    #[expect(clippy::disallowed_methods, reason = "what is waited for is another thread, not the GPU")]
    pub(super) fn before(look: u32) {
        if look < LOOKS_AWAKE {
            (0..1_u32 << look.min(PAUSES_LOG2_MAX)).for_each(|_| hint::spin_loop());
        } else {
            thread::sleep(NAP);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        panic::{self, AssertUnwindSafe},
        sync::mpsc,
        time::Duration,
    };

    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "there is no driver here, and what is tried is a long wait")]
    fn lock_held_longer_than_anybody_stays_awake_is_waited_for() {
        let lock = ShortLock::new(0);
        let (begun, has_begun) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = lock.lock().expect("nobody panicked");
                begun.send(()).expect("the other thread waits for it");
                thread::sleep(Duration::from_millis(20));
                *value = 1;
            });
            has_begun.recv().expect("the other thread sends it");
            assert_eq!(*lock.lock().expect("nobody panicked"), 1);
        });
    }

    #[test]
    fn of_many_threads_each_has_the_lock_alone() {
        const ROUNDS: u64 = 20_000;
        let lock = ShortLock::new((0, 0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        let mut both = lock.lock().expect("nobody panicked");
                        assert_eq!(both.0, both.1);
                        both.0 += 1;
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock().expect("nobody panicked"), (4 * ROUNDS, 4 * ROUNDS));
    }

    #[test]
    fn lock_under_which_a_thread_panicked_is_refused() {
        let lock = ShortLock::new(());
        let panicked = panic::catch_unwind(AssertUnwindSafe(|| {
            let _guard = lock.lock();
            panic!("under the lock");
        }));
        assert!(panicked.is_err() && lock.lock().is_err());
    }

    #[test]
    fn lock_that_a_destructor_takes_while_a_thread_panics_stays_whole() {
        struct Counts<'a>(&'a ShortLock<u32>);
        impl Drop for Counts<'_> {
            fn drop(&mut self) {
                *self.0.lock().expect("nobody panicked under it") += 1;
            }
        }
        let lock = ShortLock::new(0);
        let panicked = panic::catch_unwind(AssertUnwindSafe(|| {
            let _counts = Counts(&lock);
            panic!("under no lock");
        }));
        assert!(panicked.is_err());
        assert_eq!(*lock.lock().expect("nobody panicked under it"), 1);
    }
}
