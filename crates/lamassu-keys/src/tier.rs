//! The two keys of a vault.

/// Which of the two keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// K_in
    Inner,
    /// K_out
    Outer,
}

impl Tier {
    /// `inner` or `outer`: its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Inner => "inner",
            Tier::Outer => "outer",
        }
    }
}
