//! Refusals of client requests: the same for both object stores.

/// The reason why a request is refused. Each is the client's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no such bucket.
    #[error("there is no such bucket")]
    NoBucket,
    /// The bucket exists already.
    #[error("the bucket is there already")]
    BucketExists,
    /// The bucket is not empty.
    #[error("the bucket is not empty")]
    BucketNotEmpty,
    /// There is no such object.
    #[error("there is no such key")]
    NoKey,
    /// There is no such upload.
    #[error("there is no such upload: it may have been completed or aborted")]
    NoUpload,
    /// A condition does not hold.
    #[error("a condition of the request does not hold")]
    Precondition,
    /// A part was not uploaded, or is another one.
    #[error("part {0} was not uploaded, or is another one")]
    NoPart(u32),
    /// The parts are not in ascending order.
    #[error("parts must be listed by ascending numbers")]
    PartOrder,
    /// Only the last part may be that small.
    #[error("part {0} has less than 5 MiB, and is not the last one")]
    SmallPart(u32),
}
