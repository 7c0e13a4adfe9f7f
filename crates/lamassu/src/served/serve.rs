//! The daemon's side: one [`Served`] per mount, which answers.

use super::protocol::{Answer, Request, Status};
use crate::exit;
use crate::open::Unsealed;
use crate::{output, text};
use anyhow::{Context, Result};
use lamassu_format::header::VaultHeader;
use lamassu_fuse::control::{Caller, Calls};
use lamassu_keys::Unlocked;
use lamassu_vault::Vault;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use zeroize::Zeroizing;

/// A vault that this process has mounted, with the keys that opened it.
pub struct Served {
    /// absolute
    dir: PathBuf,
    header: VaultHeader,
    #[expect(dead_code, reason = "header changes are the next step")]
    keys: Unlocked,
    #[expect(dead_code, reason = "header changes are the next step")]
    vault: Arc<Vault>,
    read_only: bool,
}

impl Served {
    /// Takes over the keys that opened `vault`. `dir` is absolute: a daemon leaves its working directory.
    pub fn new(dir: PathBuf, unsealed: Unsealed, vault: Arc<Vault>, read_only: bool) -> Arc<Served> {
        let Unsealed { found, keys } = unsealed;
        Arc::new(Served { dir, header: found.header, keys, vault, read_only })
    }

    /// What answers the calls of a mount.
    pub fn calls(self: &Arc<Self>) -> Calls {
        let served = self.clone();
        Arc::new(move |caller, request| served.answer(caller, request))
    }

    fn answer(&self, caller: &Caller, request: &[u8]) -> Zeroizing<Vec<u8>> {
        // The parser's own words may quote a request; the caller has them, the log must not.
        let parsed = serde_json::from_slice(request)
            .context("the daemon of this mount does not know the request: it is of another version");
        let answered = parsed.and_then(|request| self.carry_out(caller, request));
        let answer = answered.unwrap_or_else(|error| {
            tracing::debug!(%error, uid = caller.uid, "a request failed");
            Answered::failed(&error)
        });
        answer.0
    }

    fn carry_out(&self, _caller: &Caller, request: Request) -> Result<Answered> {
        match request {
            Request::Status {} => Answered::done(&self.status()),
        }
    }

    fn status(&self) -> Status {
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            vault: text::hex(&self.header.id()),
            dir: self.dir.to_string_lossy().into_owned(),
            read_only: self.read_only,
        }
    }
}

/// An answer, as it is sent.
struct Answered(Zeroizing<Vec<u8>>);

impl Answered {
    fn done(value: &impl Serialize) -> Result<Answered> {
        Ok(Answered(Zeroizing::new(serde_json::to_vec(&Answer::Done(value))?)))
    }

    fn failed(error: &anyhow::Error) -> Answered {
        let answer: Answer<()> =
            Answer::Failed { code: exit::code_of(error).number(), message: output::message(error) };
        Answered(Zeroizing::new(serde_json::to_vec(&answer).unwrap_or_default()))
    }
}
