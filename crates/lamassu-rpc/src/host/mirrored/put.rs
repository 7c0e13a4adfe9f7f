//! Sends a whole table to a server, and takes the anchor back from it.

use super::copy::{existing, revision};
use crate::convert::{self, Batch};
use crate::host::{Connection, Result, Session, wait};
use crate::proto;
use lamassu_anchor::AnchorError;
use lamassu_anchor::head::Head;
use lamassu_anchor::table::{DiskTable, Readers, Table};
use lamassu_format::header::VaultId;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long the server may take to answer after all rows were sent.
const PUT_TIMEOUT: Duration = Duration::from_secs(120);

/// Reports the state of this host's copy to a server that was restored from a backup.
pub(crate) fn reconcile(connection: &Connection, vault: VaultId, copy: Option<Arc<DiskTable>>) -> Result<()> {
    let copy = match copy {
        Some(copy) => revision(&copy, &vault)?.map(|revision| (revision, copy)),
        None => None,
    };
    let head = copy.as_ref().map(|(_, copy)| Head::of(&**copy)).transpose()?.flatten();
    let known = proto::Known {
        vault: vault.0.to_vec(),
        revision: copy.as_ref().map_or(0, |(revision, _)| revision.0),
        head: head.map_or(Vec::new(), |head| head.0.to_vec()),
    };
    let wanted = connection.call(connection.anchors().reconcile(known))?;
    match copy.filter(|_| wanted.rows) {
        Some((_, copy)) => {
            let (sent, has) = send_rows(connection, (vault, None), &copy, head)?;
            // Another host may have reported a newer state meanwhile: then the session fetches that.
            if head.is_none() && sent == has { copy.commit(&[sent.change()]) } else { Ok(()) }
        }
        None => Ok(()),
    }
}

/// Puts the anchor of a vault that the server does not have: all rows of a table, which becomes the copy. `around`: the
/// vault that it lies in, if it is a dataset.
///
/// # Errors
/// [`AnchorError::Server`]; those of the table.
pub fn put(connection: &Connection, vault: VaultId, around: Option<VaultId>, table: &DiskTable) -> Result<()> {
    match send_rows(connection, (vault, around), table, None)? {
        (sent, has) if sent == has => table.commit(&[sent.change()]),
        _ => Err(connection.garbled("the anchor came to another head")),
    }
}

/// Sends all rows of a table; `head`: its head, if it was a server's. Returns the head computed from the rows, and the
/// head that the server has after that.
fn send_rows(
    connection: &Connection,
    (vault, around): (VaultId, Option<VaultId>),
    table: &DiskTable,
    head: Option<Head>,
) -> Result<(Head, Head)> {
    let (up, rows) = tokio::sync::mpsc::channel(4);
    let all_gone = tokio::sync::Notify::new();
    std::thread::scope(|scope| {
        let state = scope.spawn(|| {
            let mut anchors = connection.anchors();
            let put = anchors.put(tokio_stream::wrappers::ReceiverStream::new(rows));
            let sent = wait(async {
                tokio::pin!(put);
                tokio::select! {
                    answer = &mut put => answer,
                    // All rows were sent: the time limit starts.
                    () = async { all_gone.notified().await; tokio::time::sleep(PUT_TIMEOUT).await } => {
                        Err(tonic::Status::unavailable("no answer in time"))
                    }
                }
            })?;
            sent.map_err(|status| connection.failed(&status))
        });
        let (mut vault, mut head) = (vault.0.to_vec(), head.map_or(Vec::new(), |head| head.0.to_vec()));
        let mut around = around.map_or(Vec::new(), |around| around.0.to_vec());
        // A server that has refused reads no further. Its answer gives the reason.
        let send = |rows, all| {
            let [vault, head, around] = [&mut vault, &mut head, &mut around].map(std::mem::take);
            drop(up.blocking_send(proto::PutRequest { vault, rows, head, around, all }));
        };
        let first = in_messages(table, send)?;
        drop(up);
        all_gone.notify_one();
        let state = state.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?.into_inner();
        Ok((first, convert::head(&state.head).map_err(|error| connection.garbled(error.0))?))
    })
}

/// Passes the rows of a table to `message`, in the packing of the put, with the number of all rows in the last message.
/// Returns the head that a server gives them.
pub(super) fn in_messages(table: &DiskTable, mut message: impl FnMut(Vec<u8>, u64)) -> Result<Head> {
    let (mut batch, mut head) = (Batch::default(), Head([0; 32]));
    let mut next = |rows: Vec<u8>, all| {
        head = head.after(&convert::to_rows(&rows).unwrap_or_default());
        message(rows, all);
    };
    table.visit_all(|space, key, value| {
        batch.push(space, key, value).into_iter().for_each(|rows| next(rows, 0));
        Ok::<(), AnchorError>(())
    })?;
    let all = batch.all();
    next(batch.rest(), all);
    Ok(head)
}

/// Whether the result of putting this copy at a server is unknown.
///
/// # Errors
/// Those of the table.
pub fn is_on_its_way(copy: &Path) -> Result<bool> {
    match existing(DiskTable::open_read_only(copy, Readers::BesideWriter))? {
        Some(table) => Ok(Head::of(&*table)?.is_none()),
        None => Ok(false),
    }
}

/// Lets the server retire the anchor of a vault that a session holds exclusively.
///
/// # Errors
/// [`AnchorError::Server`].
pub fn give_up(session: &Session) -> Result<()> {
    let connection = session.connection();
    connection.call(connection.anchors().give_up(session.of())).map(drop)
}
