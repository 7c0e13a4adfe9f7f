//! Attributes of people, as the tenant declares them, and decisions over plain attributes. Decisions over tokens must
//! equal these.

use crate::names::parts_of;
use crate::{AccessError, Result};
use cedar_policy::{
    Authorizer, Context, Decision, Entities, Entity, EntityId, EntityTypeName, EntityUid, PolicySet, Request,
    RestrictedExpression, Schema,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::str::FromStr;

/// An operation on an object. The provider sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// read contents and metadata
    Read,
    /// create or replace an object
    Write,
    /// list the names in a folder
    List,
    /// remove an object
    Delete,
}

impl Action {
    /// All actions.
    pub const ALL: [Action; 4] = [Action::Read, Action::Write, Action::List, Action::Delete];

    /// The action's name in rules.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Read => "read",
            Action::Write => "write",
            Action::List => "list",
            Action::Delete => "delete",
        }
    }
}

impl FromStr for Action {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<Action> {
        let found = Action::ALL.into_iter().find(|action| action.name() == text);
        found.ok_or_else(|| AccessError::Argument(format!("{text:?} is no action: read, write, list or delete")))
    }
}

/// The kind of values that an attribute has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttributeKind {
    /// One text, or none. Rules ask for `has` first.
    Text,
    /// Any number of texts.
    Set,
    /// One whole number, or none. Rules ask for `has` first.
    Number,
}

impl AttributeKind {
    /// The kind's name on the command line and in rows.
    pub const fn name(self) -> &'static str {
        match self {
            AttributeKind::Text => "text",
            AttributeKind::Set => "set",
            AttributeKind::Number => "number",
        }
    }
}

impl FromStr for AttributeKind {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<AttributeKind> {
        let found = [AttributeKind::Text, AttributeKind::Set, AttributeKind::Number]
            .into_iter()
            .find(|kind| kind.name() == text);
        found.ok_or_else(|| AccessError::Argument(format!("{text:?} is no kind: text, set or number")))
    }
}

/// Attributes by name.
pub type Declarations = BTreeMap<String, AttributeKind>;

/// One attribute's value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// of an [`AttributeKind::Number`]
    Number(i64),
    /// of an [`AttributeKind::Text`]
    Text(String),
    /// of an [`AttributeKind::Set`]
    Set(BTreeSet<String>),
}

/// The attributes of a person.
pub type Attributes = BTreeMap<String, Value>;

/// Words that Cedar's grammar reserves.
const RESERVED: [&str; 9] = ["true", "false", "if", "then", "else", "in", "like", "has", "is"];

/// Whether a text can be the name of an attribute.
///
/// # Errors
/// [`AccessError::Name`].
pub fn check_name(name: &str) -> Result<()> {
    let is_word = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let begins = name.bytes().next().is_some_and(|b| !b.is_ascii_digit());
    match is_word && begins && name.len() <= 64 && !RESERVED.contains(&name) && !name.starts_with("__") {
        true => Ok(()),
        false => Err(AccessError::Name(name.into())),
    }
}

/// Parses attributes from words such as `dept=finance`. A set is given as one word for each of its texts.
///
/// # Errors
/// [`AccessError::NotDeclared`], [`AccessError::Value`], [`AccessError::Argument`].
pub fn parse<'a>(declared: &Declarations, words: impl IntoIterator<Item = &'a str>) -> Result<Attributes> {
    let mut attributes = Attributes::new();
    for word in words {
        let malformed = || AccessError::Argument(format!("{word:?} is no attribute with a value: NAME=VALUE"));
        let (name, text) = word.split_once('=').ok_or_else(malformed)?;
        let wrong = |what| AccessError::Value { name: name.into(), value: text.into(), what };
        let kind = declared.get(name).ok_or_else(|| AccessError::NotDeclared(name.into()))?;
        let value = match kind {
            AttributeKind::Number => {
                Value::Number(text.parse().map_err(|_| wrong("it is no whole number of 64 bits"))?)
            }
            AttributeKind::Text => Value::Text(text.into()),
            AttributeKind::Set => {
                let all = attributes.entry(name.into()).or_insert_with(|| Value::Set(BTreeSet::new()));
                if let Value::Set(all) = all {
                    all.insert(text.into());
                }
                continue;
            }
        };
        if attributes.insert(name.into(), value).is_some() {
            return Err(wrong("it is given twice; an attribute with several values is a set"));
        }
    }
    Ok(attributes)
}

/// The Cedar schema that rules are validated against.
///
/// # Errors
/// [`AccessError::Argument`] with Cedar's message.
pub fn schema(declared: &Declarations) -> Result<Schema> {
    let attributes = declared.iter().map(|(name, kind)| match kind {
        AttributeKind::Text => format!("\"{name}\"?: String"),
        AttributeKind::Set => format!("\"{name}\": Set<String>"),
        AttributeKind::Number => format!("\"{name}\"?: Long"),
    });
    let attributes = attributes.collect::<Vec<_>>().join(", ");
    let text = format!(
        "entity User {{ {attributes} }};\nentity Stored in [Stored];\nentity Key in [Key, Stored];\n\
         action \"read\", \"write\", \"list\", \"delete\" appliesTo {{ principal: [User], resource: [Key] }};\n"
    );
    let (schema, _) = Schema::from_cedarschema_str(&text).map_err(|error| AccessError::Argument(error.to_string()))?;
    Ok(schema)
}

/// Cedar's identifier of an entity.
pub(crate) fn uid(kind: &'static str, id: &str) -> EntityUid {
    let kind = EntityTypeName::from_str(kind).expect("the names of entity types in this crate are names");
    EntityUid::from_type_name_and_id(kind, EntityId::new(id))
}

/// The folders above a key, nearest first: `a/b` and `a` for `a/b/c`.
pub(crate) fn above(key: &str) -> impl Iterator<Item = &str> {
    key.match_indices('/').map(|(at, _)| &key[..at])
}

/// Makes a Cedar request. Keys and folders are identified by their paths.
pub(crate) fn request(principal: EntityUid, action: Action, resource: EntityUid) -> Option<Request> {
    Request::new(principal, uid("Action", action.name()), resource, Context::empty(), None).ok()
}

/// Decides a request. It is denied unless a rule permits it, and also if a rule forbids it or any rule fails.
pub(crate) fn decided(request: &Request, policies: &PolicySet, entities: Entities) -> bool {
    let response = Authorizer::new().is_authorized(request, policies, &entities);
    let has_failed = response.diagnostics().errors().next().is_some();
    !has_failed && response.decision() == Decision::Allow
}

/// Decides over plain attributes. `stored` is the key as it is stored at the provider.
///
/// # Errors
/// [`AccessError::Key`]; [`AccessError::Argument`] if Cedar does not take an attribute.
pub fn decide(
    policies: &PolicySet,
    declared: &Declarations,
    (person, attributes): (&str, &Attributes),
    action: Action,
    (key, stored): (&str, &str),
) -> Result<bool> {
    let path = |key: &str| {
        let parts = parts_of(key).map_err(|what| AccessError::Key { key: key.into(), what })?;
        Ok::<_, AccessError>(parts.join("/"))
    };
    let (key, stored) = (path(key)?, path(stored)?);
    let expression = |value: &Value| match value {
        Value::Number(number) => RestrictedExpression::new_long(*number),
        Value::Text(text) => RestrictedExpression::new_string(text.clone()),
        Value::Set(all) => RestrictedExpression::new_set(all.iter().cloned().map(RestrictedExpression::new_string)),
    };
    let mut all: HashMap<String, RestrictedExpression> =
        attributes.iter().map(|(name, value)| (name.clone(), expression(value))).collect();
    for (name, _) in declared.iter().filter(|(_, kind)| **kind == AttributeKind::Set) {
        all.entry(name.clone()).or_insert_with(|| RestrictedExpression::new_set([]));
    }
    let failed = |error: String| AccessError::Argument(error);
    let principal = uid("User", person);
    let user = Entity::new(principal.clone(), all, HashSet::new()).map_err(|error| failed(error.to_string()))?;
    let folders = above(&key).map(|folder| uid("Key", folder));
    let sealed = above(&stored).chain([&*stored]).map(|folder| uid("Stored", folder));
    let resource = uid("Key", &key);
    let object = Entity::new_no_attrs(resource.clone(), folders.chain(sealed).collect());
    let entities = Entities::from_entities([user, object], None).map_err(|error| failed(error.to_string()))?;
    Ok(request(principal, action, resource).is_some_and(|request| decided(&request, policies, entities)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_of_their_kinds() {
        let declared: Declarations = [
            ("dept".into(), AttributeKind::Text),
            ("projects".into(), AttributeKind::Set),
            ("level".into(), AttributeKind::Number),
        ]
        .into();
        let all = parse(&declared, ["dept=a=b", "projects=x", "projects=y", "level=-3"]).expect("good");
        assert_eq!(all["dept"], Value::Text("a=b".into()));
        assert_eq!(all["projects"], Value::Set(["x".into(), "y".into()].into()));
        assert_eq!(all["level"], Value::Number(-3));
        let stored = serde_json::to_string(&all).expect("JSON");
        assert_eq!(serde_json::from_str::<Attributes>(&stored).expect("parses"), all);
        for wrong in
            [&["dept"][..], &["colour=red"], &["level=x"], &["dept=a", "dept=b"], &["level=9223372036854775808"]]
        {
            assert!(parse(&declared, wrong.iter().copied()).is_err(), "{wrong:?}");
        }
        assert!(schema(&declared).is_ok() && schema(&Declarations::new()).is_ok());
        for wrong in ["", "1a", "a-b", "has", "__cedar", "ä"] {
            assert!(check_name(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn folders_are_all_above() {
        assert_eq!(above("a/b/c").collect::<Vec<_>>(), ["a", "a/b"]);
        assert_eq!(above("a").count(), 0);
    }
}
