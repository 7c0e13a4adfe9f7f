//! Counts operations and their total time with relaxed atomics, for a status command or a metrics endpoint.

use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

macro_rules! operations {
    ($($(#[$doc:meta])* $operation:ident = $name:literal,)*) => {
        /// The operations counted here. A front-end counts its own, and reports them by [`FrontEnd`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Operation {
            $($(#[$doc])* $operation,)*
        }

        impl Operation {
            /// All operations, in the order of declaration.
            const ALL: [Operation; [$($name),*].len()] = [$(Operation::$operation),*];

            /// The name in lists.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Operation::$operation => $name,)*
                }
            }
        }
    };
}

operations! {
    /// The keys of a dataset were loaded, when it was entered.
    OpenDataset = "open-dataset",
    /// An unknown request.
    Unknown = "unknown-request",
    /// [`Request::Status`](super::protocol::Request::Status)
    Status = "status",
    /// [`Request::Sync`](super::protocol::Request::Sync)
    Sync = "sync",
    /// [`Request::Channel`](super::protocol::Request::Channel)
    Channel = "channel",
    /// [`Request::AddSlot`](super::protocol::Request::AddSlot)
    AddSlot = "add-slot",
    /// [`Request::ChangeSlot`](super::protocol::Request::ChangeSlot)
    ChangeSlot = "change-slot",
    /// [`Request::RemoveSlot`](super::protocol::Request::RemoveSlot)
    RemoveSlot = "remove-slot",
    /// [`Request::Epochs`](super::protocol::Request::Epochs)
    Epochs = "epochs",
    /// [`Request::Rotate`](super::protocol::Request::Rotate)
    Rotate = "rotate",
    /// [`Request::RekeyStart`](super::protocol::Request::RekeyStart)
    RekeyStart = "rekey-start",
    /// [`Request::ProfileStart`](super::protocol::Request::ProfileStart)
    ProfileStart = "profile-start",
    /// [`Request::Profile`](super::protocol::Request::Profile)
    Profile = "profile",
    /// [`Request::JobStatus`](super::protocol::Request::JobStatus)
    JobStatus = "job-status",
    /// [`Request::JobCancel`](super::protocol::Request::JobCancel)
    JobCancel = "job-cancel",
    /// [`Request::CreateDataset`](super::protocol::Request::CreateDataset)
    CreateDataset = "create-dataset",
    /// [`Request::ListDatasets`](super::protocol::Request::ListDatasets)
    ListDatasets = "list-datasets",
    /// [`Request::SetDataset`](super::protocol::Request::SetDataset)
    SetDataset = "set-dataset",
    /// [`Request::DestroyDataset`](super::protocol::Request::DestroyDataset)
    DestroyDataset = "destroy-dataset",
    /// [`Request::Unload`](super::protocol::Request::Unload)
    Unload = "unload",
    /// [`Request::Load`](super::protocol::Request::Load)
    Load = "load",
}

/// An operation, with its count and total time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// its name
    pub operation: String,
    /// including failed ones
    pub count: u64,
    /// failed ones
    pub failed: u64,
    /// total time in microseconds
    pub total_us: u64,
}

/// A front-end that counts its own operations: a mount its requests, a gateway its calls.
pub trait FrontEnd: Send + Sync {
    /// All counts since its start, with names of its own.
    fn counted(&self) -> Vec<Counted>;
}

#[derive(Debug, Default)]
struct Counter {
    count: AtomicU64,
    failed: AtomicU64,
    total_ns: AtomicU64,
}

/// A counter for each [`Operation`]. Its three numbers are not read atomically.
#[derive(Debug, Default)]
pub struct Counters([Counter; Operation::ALL.len()]);

impl Counters {
    /// Runs an operation, and counts it at its end.
    pub fn count<T, E>(&self, operation: Operation, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let started = Instant::now();
        let done = work();
        let counter = &self.0[operation as usize];
        counter.count.fetch_add(1, Ordering::Relaxed);
        counter.failed.fetch_add(done.is_err().into(), Ordering::Relaxed);
        let ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        counter.total_ns.fetch_add(ns, Ordering::Relaxed);
        done
    }

    /// The operations that occurred.
    pub fn counted(&self) -> Vec<Counted> {
        let of = |(operation, counter): (Operation, &Counter)| Counted {
            operation: operation.name().into(),
            count: counter.count.load(Ordering::Relaxed),
            failed: counter.failed.load(Ordering::Relaxed),
            total_us: counter.total_ns.load(Ordering::Relaxed) / 1000,
        };
        Operation::ALL.into_iter().zip(&self.0).map(of).filter(|counted| counted.count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_operation_has_its_own_counter_and_a_name_that_no_other_has() {
        let counters = Counters::default();
        for (i, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, i);
            (0..=i).for_each(|n| _ = counters.count(operation, || if n == 0 { Err(()) } else { Ok(()) }));
        }
        let counted = counters.counted();
        assert_eq!(
            counted.iter().map(|c| c.count).collect::<Vec<_>>(),
            (1..=Operation::ALL.len() as u64).collect::<Vec<_>>()
        );
        assert!(counted.iter().all(|c| c.failed == 1));
        let names: std::collections::HashSet<_> = counted.iter().map(|c| &c.operation).collect();
        assert_eq!(names.len(), Operation::ALL.len());
    }

    #[test]
    fn times_add_up() {
        let counters = Counters::default();
        let wait = || {
            std::thread::sleep(Duration::from_millis(2));
            Ok::<_, ()>(())
        };
        (0..2).for_each(|_| counters.count(Operation::Sync, wait).unwrap());
        assert!(matches!(&counters.counted()[..], [one] if one.count == 2 && one.total_us >= 4000));
    }
}
