//! Options about the vaults that a command opens: whose signature their headers must carry, where the anchor lies, how
//! much memory a passphrase may take.
//!
//! A command flattens one of these types into its arguments, and so takes only options that it uses. The types have no
//! values: the options count before a command runs, so `main` reads them from the matches ([`Opening::given`]).

use crate::policy;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use lamassu_format::header::PublicKey;
use lamassu_host::Policy;
use lamassu_host::anchors::Choice;
use lamassu_host::pins::Given;
use std::any::Any;
use std::path::PathBuf;

const HEADING: &str = "Options about vaults";
const ADMIN_KEY: &str = "admin-key";
const ADMIN_ZONE: &str = "admin-zone";
const ANCHOR: &str = "anchor";
const ANY_MEMORY: &str = "argon2-any-memory";

fn option(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).help_heading(HEADING).help(help)
}

fn admin(command: Command) -> Command {
    let key = option(
        ADMIN_KEY,
        "Refuse a vault whose header is not signed by the administrator with this public key, whatever known-vaults \
         says; `lamassu key admin show` prints the key",
    );
    let zone = option(
        ADMIN_ZONE,
        "Refuse a vault whose header is not signed by the administrator whom this zone file pins for the vault, \
         whatever known-vaults says",
    );
    command
        .arg(key.value_name("HEX").value_parser(policy::parse_key))
        .arg(zone.value_name("FILE").value_parser(value_parser!(PathBuf)).conflicts_with(ADMIN_KEY))
}

fn anchor(command: Command) -> Command {
    let anchor = option(
        ANCHOR,
        "The vault's anchor: a file outside the store that knows the vault's newest state, or server://HOST:PORT, \
         which keeps it. `none` reads without an anchor, unverified, or makes a vault without one [default: the last \
         place used, otherwise below $XDG_STATE_HOME/lamassu/anchors, for root below /var/lib/lamassu/anchors]",
    );
    let choice = OsStringValueParser::new().map(Choice::from_argument);
    command.arg(anchor.value_name("ANCHOR").value_parser(choice))
}

fn memory(command: Command) -> Command {
    let memory = option(
        ANY_MEMORY,
        "Let a passphrase slot use more than half of the memory that is free here (Argon2id). Without this, a slot \
         that needs more is not tried",
    );
    command.arg(memory.action(ArgAction::SetTrue))
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident: $first:ident $(, $other:ident)*;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl Args for $name {
            fn augment_args(command: Command) -> Command {
                let command = $first(command);
                $(let command = $other(command);)*
                command
            }

            fn augment_args_for_update(command: Command) -> Command {
                Self::augment_args(command)
            }
        }

        impl FromArgMatches for $name {
            fn from_arg_matches(_: &ArgMatches) -> Result<Self, clap::Error> {
                Ok($name)
            }

            fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), clap::Error> {
                Ok(())
            }
        }
    )*};
}

options! {
    /// For commands that open a vault with a key.
    OpeningArg: admin, anchor, memory;
    /// For commands that verify a vault's administrator without a key.
    AdminArg: admin;
    /// For commands that verify an administrator, and may open a zone file.
    AdminOrZoneArg: admin, memory;
    /// For commands that use a vault's anchor without a key.
    AnchorArg: anchor;
    /// For commands that open a zone file.
    ZoneArg: memory;
}

/// The options of a command line.
#[derive(Default)]
pub struct Opening {
    admin: Option<Given>,
    anchor: Option<Choice>,
    any_memory: bool,
}

impl Opening {
    /// The options that were given to the innermost command, as far as it takes them.
    pub fn given(matches: &ArgMatches) -> Opening {
        if let Some((_, of_command)) = matches.subcommand() {
            return Opening::given(of_command);
        }
        let key = value(matches, ADMIN_KEY).map(|key| Given::Key(PublicKey(key)));
        Opening {
            admin: key.or_else(|| value(matches, ADMIN_ZONE).map(Given::Zone)),
            anchor: value(matches, ANCHOR),
            any_memory: value(matches, ANY_MEMORY).unwrap_or(false),
        }
    }

    /// The policy of this process.
    pub fn policy(self) -> Policy {
        policy::of_this_process(self.admin, self.any_memory, self.anchor)
    }
}

/// The value of an option; `None`: it was not given, or the command does not take it.
fn value<T: Any + Clone + Send + Sync>(matches: &ArgMatches, name: &str) -> Option<T> {
    matches.try_get_one::<T>(name).ok().flatten().cloned()
}
