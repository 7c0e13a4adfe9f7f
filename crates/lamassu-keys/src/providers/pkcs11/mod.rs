//! `pkcs11:`: a key inside a token, which unwraps a slot's secret there and never leaves it.
//!
//! A slot holds 32 random bytes sealed by the token's key (RSA-OAEP or AES-GCM). Opening it needs the token, its PIN,
//! and that key. After sealing, unsealing is tested before anything is stored. A PIN is tried once in a run: tokens
//! count wrong ones.
//!
//! A module is loaded once and stays loaded. All users of a token in this process share its sessions and its login.

mod session;
mod uri;

use super::Location;
use super::bytes::read_key;
use super::prompt;
use crate::fault::{Cause, TokenFault};
use crate::source::{Ask, Fetched, KeyProvider, SourceError, Token};
use cryptoki::context::{CInitializeArgs, CInitializeFlags, Pkcs11};
use cryptoki::error::{Error, RvError};
use cryptoki::session::{Session, SessionState, UserType};
use cryptoki::slot::{Slot, TokenInfo};
use cryptoki::types::AuthPin;
use lamassu_format::header::SlotKind;
use session::TokenKey;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use uri::Uri;

pub(super) const LOCATION: Location = Location {
    name: "pkcs11",
    is_scheme: true,
    usage: "pkcs11:token=LABEL;object=LABEL?module-path=FILE&pin-source=file:FILE",
    kinds: &[SlotKind::Pkcs11],
    interactive: false,
    provider: |argument| argument.and_then(Uri::parse).map(|uri| Arc::new(Provider { uri }) as _),
};

/// The module that passes calls to all modules that the system knows.
const PROXY: &str = "p11-kit-proxy.so";

struct Provider {
    uri: Uri,
}

impl KeyProvider for Provider {
    fn fetch(&self, _kind: SlotKind, ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let key = self.key(ask, Pkcs11::open_ro_session)?;
        Ok(Fetched::Token(Box::new(key) as Box<dyn Token>))
    }

    fn can_destroy(&self) -> Result<(), SourceError> {
        Ok(())
    }

    fn destroy(&self, ask: &Ask<'_>) -> Result<Vec<String>, SourceError> {
        Ok(self.key(ask, Pkcs11::open_rw_session)?.destroy()?)
    }
}

/// An unexpected error of the token.
fn failed(op: &'static str) -> impl FnOnce(Error) -> TokenFault {
    move |e| TokenFault::Failed { op, source: Box::new(e) }
}

/// The module at a path, loaded and initialised once.
fn module(path: Option<&Path>) -> Result<Pkcs11, TokenFault> {
    static LOADED: Mutex<Option<HashMap<PathBuf, Pkcs11>>> = Mutex::new(None);
    let given = path.is_some();
    let path = path.unwrap_or(Path::new(PROXY));
    // A panic elsewhere cannot leave the map in an invalid state.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default();
    if let Some(module) = loaded.get(path) {
        return Ok(module.clone());
    }
    let unusable = |e: Error| match given {
        true => TokenFault::Module { path: path.into(), source: Box::new(e) as Cause },
        false => TokenFault::NoModule,
    };
    let module = Pkcs11::new(path).map_err(unusable)?;
    match module.initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK)) {
        // It is loaded already, under another name.
        Ok(()) | Err(Error::Pkcs11(RvError::CryptokiAlreadyInitialized, _)) => {}
        Err(e) => return Err(unusable(e)),
    }
    loaded.insert(path.into(), module.clone());
    Ok(module)
}

impl Provider {
    /// The key, in a logged-in session of its own.
    fn key(
        &self,
        ask: &Ask<'_>,
        open: impl FnOnce(&Pkcs11, Slot) -> Result<Session, Error>,
    ) -> Result<TokenKey, SourceError> {
        let module = module(self.uri.module.as_deref())?;
        let (slot, info) = self.token(&module)?;
        let session = open(&module, slot).map_err(failed("open a session"))?;
        if info.login_required() {
            self.log_in(&module, slot, &info, &session, ask)?;
        }
        Ok(TokenKey::find(session, &self.uri)?)
    }

    /// The one token that matches the URI.
    fn token(&self, module: &Pkcs11) -> Result<(Slot, TokenInfo), TokenFault> {
        let mut found = Vec::new();
        for slot in module.get_slots_with_initialized_token().map_err(failed("list tokens"))? {
            // A token that is being removed does not match.
            let Ok(info) = module.get_token_info(slot) else { continue };
            if self.means(slot, &info) {
                found.push((slot, info));
            }
        }
        let count = found.len();
        match (found.pop(), count) {
            (Some(one), 1) => Ok(one),
            (None, _) => Err(TokenFault::NoToken),
            (Some(_), _) => Err(TokenFault::ManyTokens { count }),
        }
    }

    fn means(&self, slot: Slot, info: &TokenInfo) -> bool {
        let is = |wanted: &Option<String>, there: &str| wanted.as_ref().is_none_or(|w| w == there);
        is(&self.uri.token, info.label())
            && is(&self.uri.manufacturer, info.manufacturer_id())
            && is(&self.uri.model, info.model())
            && is(&self.uri.serial, info.serial_number())
            && self.uri.slot_id.is_none_or(|id| id == slot.id())
    }

    fn log_in(
        &self,
        module: &Pkcs11,
        slot: Slot,
        info: &TokenInfo,
        session: &Session,
        ask: &Ask<'_>,
    ) -> Result<(), SourceError> {
        // All sessions with a token share one login.
        let state = session.get_session_info().map(|i| i.session_state());
        if matches!(state, Ok(SessionState::RoUser | SessionState::RwUser)) {
            return Ok(());
        }
        if info.user_pin_locked() {
            return Err(TokenFault::PinLocked.into());
        }
        let pin = match &self.uri.pin_source {
            Some(path) => Some(pin_file(path)?),
            // The token has its own keypad.
            None if info.protected_authentication_path() => None,
            None => Some(pin_typed(info, ask)?),
        };
        match session.login(UserType::User, pin.as_ref()) {
            Ok(()) | Err(Error::Pkcs11(RvError::UserAlreadyLoggedIn, _)) => Ok(()),
            Err(Error::Pkcs11(RvError::PinLocked, _)) => Err(TokenFault::PinLocked.into()),
            Err(Error::Pkcs11(RvError::PinIncorrect | RvError::PinInvalid | RvError::PinLenRange, _)) => {
                let now = module.get_token_info(slot).ok();
                Err(match now {
                    Some(now) if now.user_pin_locked() => TokenFault::PinLocked,
                    now => TokenFault::WrongPin { last_try: now.is_some_and(|i| i.user_pin_final_try()) },
                }
                .into())
            }
            Err(e) => Err(failed("log in")(e).into()),
        }
    }
}

fn pin_file(path: &Path) -> Result<AuthPin, SourceError> {
    let unreadable = |source: Cause| SourceError::Auxiliary { role: "PIN file", path: path.into(), source };
    let mut file = File::open(path).map_err(|e| unreadable(e.into()))?;
    let bytes = read_key(&mut file, SlotKind::Passphrase).map_err(|e| unreadable(e.into()))?;
    let bytes = bytes.ok_or_else(|| unreadable("too long for a PIN".into()))?;
    let text = std::str::from_utf8(bytes.expose()).map_err(|e| unreadable(e.into()))?;
    Ok(AuthPin::from(text))
}

fn pin_typed(info: &TokenInfo, ask: &Ask<'_>) -> Result<AuthPin, SourceError> {
    let text = format!("PIN of token {} for {}: ", info.label().escape_debug(), ask.subject);
    let typed = prompt::secret(&text, ask).map_err(|e| match e {
        SourceError::Terminal { source } | SourceError::Stdin { source }
            if source.kind() != std::io::ErrorKind::Interrupted =>
        {
            TokenFault::NoPin.into()
        }
        other => other,
    })?;
    match std::str::from_utf8(typed.expose()) {
        Ok(pin) => Ok(AuthPin::from(pin)),
        Err(_) => Err(TokenFault::WrongPin { last_try: false }.into()),
    }
}
