//! The access log: one line for each request, written when its answer has ended. It contains no secret, no signature
//! and no header. Keys of objects, which are names of files, are logged only if the configuration says so.

use crate::credentials::User;
use crate::limits::Exceeded;
use crate::metrics::Metrics;
use parking_lot::Mutex;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

/// The target of the lines.
pub const TARGET: &str = "lamassu::access";

#[derive(Default)]
struct Fields {
    user: Option<Arc<User>>,
    operation: Option<String>,
    bucket: Option<String>,
    key: Option<String>,
    status: u16,
    received: u64,
    sent: u64,
    cut: Option<ErrorKind>,
}

/// A request under way. Clones share it; dropping the last one writes the line.
#[derive(Clone)]
pub struct RequestLog(Arc<Line>);

struct Line {
    id: String,
    address: IpAddr,
    method: http::Method,
    begun: Instant,
    with_keys: bool,
    metrics: Metrics,
    fields: Mutex<Fields>,
}

impl RequestLog {
    /// Begins the line of a request.
    pub fn new(id: String, address: IpAddr, method: http::Method, with_keys: bool, metrics: Metrics) -> RequestLog {
        let fields = Mutex::default();
        RequestLog(Arc::new(Line { id, address, method, begun: Instant::now(), with_keys, metrics, fields }))
    }

    /// The request's number, which its answer has too.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Sets the user and the subject of the request.
    pub fn is_of(&self, user: Option<&Arc<User>>, operation: &str, bucket: Option<&str>, key: Option<&str>) {
        let fields = &mut *self.0.fields.lock();
        (fields.user, fields.operation) = (user.cloned(), Some(operation.into()));
        fields.bucket = bucket.map(String::from);
        fields.key = key.filter(|_| self.0.with_keys).map(String::from);
    }

    /// Counts that the request exceeds a limit of its tenant.
    pub fn exceeds(&self, limit: Exceeded) {
        self.0.metrics.exceeded(limit);
    }

    /// Sets the status of the answer.
    pub fn is_answered(&self, status: http::StatusCode) {
        self.0.fields.lock().status = status.as_u16();
    }

    /// Counts received bytes.
    pub fn received(&self, bytes: usize) {
        self.0.fields.lock().received += bytes as u64;
    }

    /// The client's body has failed: it stalled, or is not whole.
    pub fn is_cut(&self, by: ErrorKind) {
        self.0.fields.lock().cut = Some(by);
    }

    /// Why the client's body has failed, if it has.
    pub fn cut(&self) -> Option<ErrorKind> {
        self.0.fields.lock().cut
    }

    /// Whether any of a body was received.
    pub fn has_received(&self) -> bool {
        self.0.fields.lock().received > 0
    }

    /// Counts sent bytes.
    pub fn sent(&self, bytes: usize) {
        self.0.fields.lock().sent += bytes as u64;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let fields = self.fields.get_mut();
        let took = self.begun.elapsed();
        let operation = fields.operation.as_deref().unwrap_or("-");
        self.metrics.answered(operation, fields.status, (fields.received, fields.sent), took);
        tracing::info!(
            target: TARGET,
            id = self.id,
            address = %self.address,
            method = %self.method,
            operation,
            user = fields.user.as_ref().map_or("-", |user| &user.name),
            tenant = fields.user.as_ref().map_or("-", |user| user.tenant.name()),
            bucket = fields.bucket.as_deref().unwrap_or("-"),
            key = fields.key.as_deref().unwrap_or("-"),
            status = fields.status,
            received = fields.received,
            sent = fields.sent,
            milliseconds = took.as_millis() as u64,
            "request"
        );
    }
}

#[cfg(test)]
pub mod lines {
    use parking_lot::Mutex;
    use std::sync::Arc;
    use tracing::field::{Field, Visit};
    use tracing::{Dispatch, Event, Metadata, Subscriber, span};

    /// The lines of a log.
    #[derive(Clone, Default)]
    pub struct Lines(pub Arc<Mutex<Vec<String>>>);

    impl Lines {
        /// Runs `work` on this thread, and keeps its lines.
        pub fn while_doing<T>(&self, work: impl FnOnce() -> T) -> T {
            // Where there is one subscriber, `tracing` asks only the thread that comes to a line first whether anybody
            // wants it. That thread may be another test's, which has none.
            let _another = Dispatch::new(Lines::default());
            tracing::subscriber::with_default(self.clone(), work)
        }
    }

    impl Visit for Lines {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            if let Some(line) = self.0.lock().last_mut() {
                *line += &format!("{field}={value:?} ");
            }
        }
    }

    impl Subscriber for Lines {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &Event<'_>) {
            self.0.lock().push(format!("{} ", event.metadata().level()));
            event.record(&mut self.clone());
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }
}
