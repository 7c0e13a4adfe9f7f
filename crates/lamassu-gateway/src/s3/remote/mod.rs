//! The same protocol in front of a provider's S3: requests become calls of [`Remote`].

mod bucket;
mod fault;
mod read;
mod upload;
mod write;

use super::access::Session;
use super::body::{Content, Sink};
use super::fault::lost;
use super::listing::{Listing, Row, Rows};
use crate::objects::list::Query;
use crate::remote::list::Item;
use crate::remote::objects::Open;
use crate::remote::upload::Upload;
use crate::remote::{Remote, RemoteError};
use s3s::S3Result;
use std::io;
use std::sync::Arc;

/// See the module's head.
pub struct Gateway {
    pub(super) remote: Arc<Remote>,
    pub(super) region: String,
}

impl Gateway {
    async fn blocking<T: Send + 'static>(
        &self,
        session: &Session,
        call: impl FnOnce(&Arc<Remote>) -> Result<T, RemoteError> + Send + 'static,
    ) -> S3Result<T> {
        self.blocking_s3(session, |remote| Ok(call(remote)?)).await
    }

    async fn blocking_s3<T: Send + 'static>(
        &self,
        session: &Session,
        call: impl FnOnce(&Arc<Remote>) -> S3Result<T> + Send + 'static,
    ) -> S3Result<T> {
        let remote = self.remote.clone();
        session.spawn(move || call(&remote)).await.map_err(lost)?
    }
}

impl Sink for Upload {
    fn add(&self, _: u64, data: &[u8]) -> S3Result<()> {
        Ok(self.write(data)?)
    }
}

impl Content for Open {
    fn piece(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.read(at, len).map_err(io::Error::other)
    }
}

#[async_trait::async_trait]
impl Listing for Gateway {
    async fn rows(&self, session: &Session, bucket: &str, query: Query) -> S3Result<Rows> {
        let bucket = bucket.to_owned();
        let page = self.blocking(session, move |remote| remote.list(&bucket, &query)).await?;
        let mut rows = Rows { next: page.next, ..Rows::default() };
        for item in page.items {
            match item {
                Item::Group(group) => rows.groups.push(group),
                Item::Key(key, shown) => {
                    rows.keys.push(Row { key, size: shown.size, mtime: shown.mtime, attrs: shown.attrs });
                }
            }
        }
        Ok(rows)
    }
}
