//! The locks and counters that the allocator's threads share, or loom's models of them.

use std::{
    hint,
    sync::{LockResult, TryLockError},
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

/// How often a thread looks after a lock that another one has before it sleeps: for a third of a millisecond in all.
const LOOKS: u32 = if cfg!(loom) { 0 } else { 20 };
/// Before each look it pauses twice as long, up to 2 to this power. Looking takes the lock away from the processor of the
/// thread that has it, so sixteen threads that looked more often were slower than if they had slept at once.
const PAUSES_LOG2_MAX: u32 = 9;

/// Takes a lock that is held for less time than it takes to fall asleep and be woken.
///
/// # Errors
///
/// As [`Mutex::lock`].
#[inline]
pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> LockResult<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(poisoned)) => Err(poisoned),
        Err(TryLockError::WouldBlock) => {
            pause_while_held(mutex);
            mutex.lock()
        }
    }
}

/// Pauses until the lock is free, or long enough. Returns no guard, since that would go through memory.
#[cold]
fn pause_while_held<T>(mutex: &Mutex<T>) {
    for look in 0..LOOKS {
        for _ in 0..1_u32 << look.min(PAUSES_LOG2_MAX) {
            hint::spin_loop();
        }
        if !matches!(mutex.try_lock(), Err(TryLockError::WouldBlock)) {
            return;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{panic, sync::mpsc, thread, time::Duration};

    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "there is no driver here, and what is tried is a long wait")]
    fn lock_held_longer_than_any_pause_is_waited_for() {
        let mutex = Mutex::new(0);
        let (begun, has_begun) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = lock_soon(&mutex).expect("nobody panicked");
                begun.send(()).expect("the other thread waits for it");
                thread::sleep(Duration::from_millis(20));
                *value = 1;
            });
            has_begun.recv().expect("the other thread sends it");
            assert_eq!(*lock_soon(&mutex).expect("nobody panicked"), 1);
        });
    }

    #[test]
    fn of_many_threads_each_has_the_lock_alone() {
        const ROUNDS: u64 = 20_000;
        let mutex = Mutex::new((0, 0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        let mut both = lock_soon(&mutex).expect("nobody panicked");
                        assert_eq!(both.0, both.1);
                        both.0 += 1;
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*mutex.lock().expect("nobody panicked"), (4 * ROUNDS, 4 * ROUNDS));
    }

    #[test]
    fn lock_under_which_a_thread_panicked_is_refused() {
        let mutex = Mutex::new(());
        let panicked = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            let _guard = lock_soon(&mutex);
            panic!("under the lock");
        }));
        assert!(panicked.is_err() && lock_soon(&mutex).is_err());
    }
}
