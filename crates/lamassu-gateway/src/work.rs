//! Blocking work for requests. A client that goes away ends its request, but not the work of a thread for it. So the
//! work itself holds the request's turn, and a tenant never has more threads than turns.

use crate::limits::Turn;
use std::cell::RefCell;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, spawn_blocking};

thread_local! {
    /// The turn of the request that this thread works for. If it is set, the thread may block.
    static CURRENT: RefCell<Option<Arc<Turn>>> = const { RefCell::new(None) };
}

/// Resets [`CURRENT`], also if the work panics.
struct Working;

impl Working {
    fn begin(turn: Option<Arc<Turn>>) -> Working {
        CURRENT.set(turn);
        Working
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

/// The turn of the request that this thread works for.
pub fn current() -> Option<Arc<Turn>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Runs the work of a request on a thread that may block. The request's turn lasts at least as long as the work.
pub fn spawn<T: Send + 'static>(turn: Arc<Turn>, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    spawn_blocking(move || {
        let _working = Working::begin(Some(turn));
        work()
    })
}

/// Runs what may wait for the store when a value is dropped. If a client goes away during its request, values are
/// dropped by a thread that must not block: then another thread, which holds `turn`, does the work.
pub fn beside_async(turn: Option<Arc<Turn>>, work: impl FnOnce() + Send + 'static) {
    match Handle::try_current() {
        Ok(runtime) if current().is_none() => {
            drop(runtime.spawn_blocking(move || {
                let _working = Working::begin(turn);
                work();
            }));
        }
        Ok(_) | Err(_) => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{Limits, Tenant};
    use std::sync::mpsc;

    fn one_at_once() -> Arc<Tenant> {
        Arc::new(Tenant::new("t", Limits { requests_at_once: 1, ..Limits::default() }))
    }

    async fn is_given_back(tenant: &Arc<Tenant>) {
        while tenant.begin("u").is_none() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_that_is_given_up_counts_as_long_as_its_work_goes_on() {
        let tenant = one_at_once();
        let turn = Arc::new(tenant.begin("u").expect("the first"));
        let (end, ended) = mpsc::channel::<()>();
        let work = spawn(turn.clone(), move || ended.recv());
        // The client hangs up.
        drop((turn, work));
        assert!(tenant.begin("u").is_none());
        end.send(()).expect("it waits");
        is_given_back(&tenant).await;
    }

    #[tokio::test]
    async fn what_is_left_to_another_thread_counts_too() {
        let tenant = one_at_once();
        let turn = Arc::new(tenant.begin("u").expect("the first"));
        let found = spawn(turn, || {
            // A thread that may block does it itself.
            let thread = std::thread::current().id();
            let (told, tell) = mpsc::channel();
            beside_async(None, move || told.send(std::thread::current().id()).expect("it is waited for"));
            (current(), tell.try_recv() == Ok(thread))
        });
        let (turn, is_done) = found.await.expect("no panic");
        assert!(is_done && turn.is_some() && current().is_none());
        let (end, ended) = mpsc::channel::<()>();
        beside_async(turn, move || ended.recv().expect("it is sent"));
        assert!(tenant.begin("u").is_none());
        end.send(()).expect("it waits");
        is_given_back(&tenant).await;
    }
}
