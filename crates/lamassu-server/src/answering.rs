//! Answers administrators by a socket in the server's directory, which only its owner may enter. The threads are
//! separate from those that serve hosts: hosts cannot block the command that revokes one.

use crate::admin::{Answer, LINE_MAX, Request, SOCKET};
use crate::administered::Administered;
use crate::backup;
use crate::reserve::Reserve;
use crate::{Result, ServerError};
use std::fs;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// Time for reading a request, and for sending its answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the receiver of a backup may read nothing: it verifies each anchor before it reads the next one, and writes
/// to a disk of its own. One that has stopped for good keeps a table open, which must end.
const BACKUP_PAUSE_MAX: Duration = Duration::from_secs(3600);

/// Answers administrators from now on.
///
/// # Errors
/// [`ServerError::File`].
pub fn start(dir: &Path, administered: Administered, reserve: Option<&Reserve>) -> Result<()> {
    let path = dir.join(SOCKET);
    // The state is locked, so no other server uses this socket.
    let _ = fs::remove_file(&path);
    let bind = || UnixListener::bind(&path);
    let listener = reserve.map_or_else(bind, |reserve| reserve.within(bind));
    let listener = listener.map_err(ServerError::file("listen on", &path))?;
    let serve = move || {
        for stream in listener.incoming() {
            let administered = administered.clone();
            let answers = stream.and_then(|stream| {
                std::thread::Builder::new().name("answer".into()).spawn(move || {
                    if let Err(error) = answer(&stream, &administered, TIMEOUT) {
                        tracing::info!(%error, "an administrator was not answered");
                    }
                })
            });
            if let Err(error) = answers {
                tracing::warn!(%error, "an administrator cannot be answered");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    };
    let started = std::thread::Builder::new().name("admin".into()).spawn(serve);
    started.map(drop).map_err(ServerError::file("start a thread for", &path))
}

fn answer(stream: &UnixStream, administered: &Administered, timeout: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_MAX)).read_line(&mut line)?;
    let answer = match serde_json::from_str(&line) {
        Ok(Request::Backup) => return send_backup(stream, administered),
        Ok(request) => administered.answer(request),
        Err(error) => Err(ServerError::Garbled { detail: error.to_string() }),
    };
    let answer = answer.unwrap_or_else(|error| Answer::Failed { message: error.to_string(), code: error.code() });
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    let mut stream = stream;
    stream.write_all(&line)
}

/// The backup follows the request on the same stream. An incomplete one is no backup.
fn send_backup(stream: &UnixStream, administered: &Administered) -> io::Result<()> {
    stream.set_write_timeout(Some(BACKUP_PAUSE_MAX))?;
    let mut to = BufWriter::new(stream);
    backup::send(administered, &mut to).map_err(|error| {
        tracing::error!(%error, "a backup could not be made");
        io::Error::other(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run;

    /// Its receiver verifies an anchor, or waits for its disk, and reads nothing meanwhile.
    #[test]
    fn a_backup_waits_for_its_receiver_for_longer_than_an_answer_does() {
        const SHORT: Duration = Duration::from_millis(50);
        let dir = tempfile::tempdir().expect("a directory");
        let (server, to) = (dir.path().join("server"), dir.path().join("to"));
        run::init(&server).expect("makes");
        // More than the socket takes.
        let file = fs::File::options().append(true).open(server.join("policy.toml"));
        file.and_then(|mut file| file.write_all(&b"#\n".repeat(1 << 20))).expect("writes");
        let administered = Administered::of(&server).expect("opens");
        let (asks, answers) = UnixStream::pair().expect("a pair");
        std::thread::scope(|scope| {
            let of = &administered;
            let sent = scope.spawn(move || answer(&answers, of, SHORT));
            let line = serde_json::to_vec(&Request::Backup).expect("serializes");
            (&asks).write_all(&[&line[..], b"\n"].concat()).expect("asks");
            let mut from = BufReader::new(&asks);
            from.fill_buf().expect("it has begun");
            std::thread::sleep(20 * SHORT);
            backup::receive(&mut from, &to).expect("all of it");
            sent.join().expect("no panic").expect("sends");
        });
    }
}
