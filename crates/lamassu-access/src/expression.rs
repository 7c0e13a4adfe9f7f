//! Translates an expression over attributes to one over tokens, in Cedar's JSON policy format.
//!
//! An unknown form is refused, never passed on. In a valid rule (`compile`), `has` guards each attribute that may be
//! missing. So no expression fails during a decision, and an expression over tokens equals its original wherever it is
//! evaluated.

use crate::attribute::Action;
use crate::names::{Names, parts_of};
use crate::token::{Cuts, Interval, TokenKey, intervals_in};
use crate::{AttributeKind, Declarations};
use serde_json::{Value as Json, json};
use std::collections::BTreeSet;

/// The type of people over tokens.
pub const PERSON: &str = "P";
/// The type of keys and folders over tokens.
pub const KEY: &str = "K";
/// The attribute of a person that holds the tokens.
pub const TOKENS: &str = "t";

/// A translated expression, or the reason why there is none.
pub type Translated<T = Json> = std::result::Result<T, String>;

/// The translator of one tenant's rules.
pub struct Translator<'a> {
    /// the declared attributes
    pub declared: &'a Declarations,
    /// the key of the epoch
    pub tokens: &'a TokenKey,
    /// the tenant's sealing of keys
    pub names: &'a Names,
    /// the numbers that rules compare attributes with; the first pass collects them
    pub cuts: Cuts,
    /// whether this is the first pass
    pub is_collecting: bool,
    /// tokens that the translated rules ask for
    pub vocabulary: BTreeSet<String>,
}

/// A literal value in a rule.
enum Literal {
    Text(String),
    Number(i64),
}

fn part<'a>(of: &'a Json, name: &str) -> Translated<&'a Json> {
    of.get(name).ok_or_else(|| format!("{name} is missing in Cedar's JSON of it"))
}

fn literal(from: &Json) -> Option<Literal> {
    match from.get("Value") {
        Some(Json::String(text)) => Some(Literal::Text(text.clone())),
        Some(Json::Number(number)) => number.as_i64().map(Literal::Number),
        Some(_) => None,
        None => match literal(from.get("neg")?.get("arg")?)? {
            Literal::Number(number) => number.checked_neg().map(Literal::Number),
            Literal::Text(_) => None,
        },
    }
}

fn literals(from: &Json) -> Option<Vec<Literal>> {
    match from.get("Set") {
        Some(Json::Array(all)) => all.iter().map(literal).collect(),
        _ => None,
    }
}

fn entity(from: &Json) -> Option<(&str, &str)> {
    let entity = from.get("Value")?.get("__entity")?;
    Some((entity.get("type")?.as_str()?, entity.get("id")?.as_str()?))
}

fn variable(from: &Json) -> Option<&str> {
    from.get("Var")?.as_str()
}

fn entity_json(kind: &str, id: &str) -> Json {
    json!({ "Value": { "__entity": { "type": kind, "id": id } } })
}

fn never() -> Json {
    json!({ "Value": false })
}

impl Translator<'_> {
    /// The principal's attribute that an expression reads, if it is such an access.
    fn attribute<'a>(&self, from: &'a Json) -> Option<(&'a str, AttributeKind)> {
        let access = from.get(".")?;
        if variable(access.get("left")?)? != "principal" {
            return None;
        }
        let name = access.get("attr")?.as_str()?;
        self.declared.get(name).map(|kind| (name, *kind))
    }

    fn has_token(&mut self, token: String) -> Json {
        let test = json!({ "contains": {
            "left": { ".": { "left": { "Var": "principal" }, "attr": TOKENS } }, "right": { "Value": token }
        } });
        self.vocabulary.insert(token);
        test
    }

    fn has_tokens(&mut self, how: &str, tokens: BTreeSet<String>) -> Json {
        // The empty set: `containsAll` of it is true, `containsAny` of it is false.
        if tokens.is_empty() {
            return json!({ "Value": how == "containsAll" });
        }
        let set: Vec<Json> = tokens.iter().map(|token| json!({ "Value": token })).collect();
        self.vocabulary.extend(tokens);
        json!({ how: { "left": { ".": { "left": { "Var": "principal" }, "attr": TOKENS } }, "right": { "Set": set } } })
    }

    /// Tests that a number lies in one of several intervals.
    fn in_intervals(&mut self, name: &str, wanted: &[Interval]) -> Json {
        let cuts = self.cuts.entry(name.into()).or_default();
        if self.is_collecting {
            cuts.extend(wanted.iter().flat_map(|(from, to)| [*from, *to]).flatten());
            return never();
        }
        let intervals: BTreeSet<Interval> = wanted.iter().flat_map(|wanted| intervals_in(cuts, *wanted)).collect();
        let tokens = intervals.into_iter().map(|interval| self.tokens.interval(name, interval)).collect();
        self.has_tokens("containsAny", tokens)
    }

    /// Translates a Boolean expression.
    ///
    /// # Errors
    /// The part that tokens cannot express.
    pub fn boolean(&mut self, from: &Json) -> Translated {
        let (name, of) =
            match from.as_object().filter(|object| object.len() == 1).and_then(|object| object.iter().next()) {
                Some(only) => only,
                None => return Err("an expression is not what Cedar's JSON has".into()),
            };
        match name.as_str() {
            "Value" if of.is_boolean() => Ok(from.clone()),
            "!" => Ok(json!({ "!": { "arg": self.boolean(part(of, "arg")?)? } })),
            "&&" | "||" => {
                let (left, right) = (self.boolean(part(of, "left")?)?, self.boolean(part(of, "right")?)?);
                Ok(json!({ name: { "left": left, "right": right } }))
            }
            "if-then-else" => {
                let (when, then) = (self.boolean(part(of, "if")?)?, self.boolean(part(of, "then")?)?);
                Ok(json!({ "if-then-else": { "if": when, "then": then, "else": self.boolean(part(of, "else")?)? } }))
            }
            "has" => self.has(of),
            "==" => self.equal(of),
            "!=" => Ok(json!({ "!": { "arg": self.equal(of)? } })),
            "<" | "<=" | ">" | ">=" => self.compare(name, of),
            "contains" => self.contains(of),
            "containsAll" | "containsAny" => {
                let (left, right) = (part(of, "left")?, part(of, "right")?);
                match (self.attribute(left), literals(right)) {
                    (Some((attribute, AttributeKind::Set)), Some(all)) => {
                        let tokens = all.into_iter().map(|literal| match literal {
                            Literal::Text(text) => Ok(self.tokens.text(attribute, &text)),
                            Literal::Number(_) => Err("a set of texts has no number".to_owned()),
                        });
                        let tokens = tokens.collect::<Translated<_>>()?;
                        Ok(self.has_tokens(name, tokens))
                    }
                    _ => Err(format!("{name} is asked of an attribute that is a set, with a list of texts")),
                }
            }
            "in" => self.is_in(of),
            "is" => {
                let kind = match (variable(part(of, "left")?), part(of, "entity_type")?.as_str()) {
                    (Some("principal"), Some("User")) => PERSON,
                    (Some("resource"), Some("Key")) => KEY,
                    _ => return Err("`is` is asked of principal and User, or of resource and Key".into()),
                };
                if of.get("in").is_some() {
                    return Err("`is … in` within a condition: write `is` and `in` with && between them".into());
                }
                Ok(json!({ "is": { "left": of["left"].clone(), "entity_type": kind } }))
            }
            other => Err(format!("{other:?} cannot be decided on tokens")),
        }
    }

    fn has(&mut self, of: &Json) -> Translated {
        let name = part(of, "attr")?.as_str().unwrap_or_default();
        if variable(part(of, "left")?) != Some("principal") {
            return Err("`has` is asked of principal".into());
        }
        match self.declared.get(name) {
            Some(AttributeKind::Set) => Ok(json!({ "Value": true })),
            Some(AttributeKind::Text | AttributeKind::Number) => {
                let token = self.tokens.present(name);
                Ok(self.has_token(token))
            }
            None => Err(format!("there is no attribute {name:?}")),
        }
    }

    fn equal(&mut self, of: &Json) -> Translated {
        let (left, right) = (part(of, "left")?, part(of, "right")?);
        let (left, right) =
            if literal(left).is_some() || entity(left).is_some() { (right, left) } else { (left, right) };
        match (self.attribute(left), literal(right)) {
            (Some((name, AttributeKind::Text)), Some(Literal::Text(text))) => {
                let token = self.tokens.text(name, &text);
                return Ok(self.has_token(token));
            }
            (Some((name, AttributeKind::Number)), Some(Literal::Number(number))) => {
                return Ok(self.in_intervals(name, &[one(number)]));
            }
            _ => {}
        }
        match (variable(left), entity(right)) {
            (Some(variable), Some((kind, id))) => {
                let entity = self.entity_of(variable, kind, id, false)?;
                Ok(json!({ "==": { "left": left.clone(), "right": entity } }))
            }
            _ => Err("== and != compare an attribute with a literal, or principal, action, resource with one".into()),
        }
    }

    fn compare(&mut self, operator: &str, of: &Json) -> Translated {
        let (left, right) = (part(of, "left")?, part(of, "right")?);
        let (name, operator, number) =
            match (self.attribute(left), literal(right), literal(left), self.attribute(right)) {
                (Some((name, AttributeKind::Number)), Some(Literal::Number(number)), _, _) => (name, operator, number),
                (_, _, Some(Literal::Number(number)), Some((name, AttributeKind::Number))) => {
                    (name, turned(operator), number)
                }
                _ => return Err(format!("{operator} compares an attribute that is a number with a literal")),
            };
        let wanted: Option<Interval> = match operator {
            "<" => Some((None, Some(number))),
            "<=" => Some((None, number.checked_add(1))),
            ">" => number.checked_add(1).map(|from| (Some(from), None)),
            _ => Some((Some(number), None)),
        };
        Ok(match wanted {
            Some(wanted) => self.in_intervals(name, &[wanted]),
            None => never(),
        })
    }

    fn contains(&mut self, of: &Json) -> Translated {
        let (left, right) = (part(of, "left")?, part(of, "right")?);
        if let (Some((name, AttributeKind::Set)), Some(Literal::Text(text))) = (self.attribute(left), literal(right)) {
            let token = self.tokens.text(name, &text);
            return Ok(self.has_token(token));
        }
        match (literals(left), self.attribute(right)) {
            (Some(all), Some((name, AttributeKind::Text))) => {
                let texts = all.into_iter().filter_map(|literal| match literal {
                    Literal::Text(text) => Some(self.tokens.text(name, &text)),
                    Literal::Number(_) => None,
                });
                let texts = texts.collect();
                Ok(self.has_tokens("containsAny", texts))
            }
            (Some(all), Some((name, AttributeKind::Number))) => {
                let numbers: Vec<Interval> = all
                    .into_iter()
                    .filter_map(|literal| match literal {
                        Literal::Number(number) => Some(one(number)),
                        Literal::Text(_) => None,
                    })
                    .collect();
                Ok(self.in_intervals(name, &numbers))
            }
            _ => Err("contains is asked of a set with a text, or of a list of literals with an attribute".into()),
        }
    }

    fn is_in(&mut self, of: &Json) -> Translated {
        let (left, right) = (part(of, "left")?, part(of, "right")?);
        let variable = variable(left).ok_or("`in` is asked of action and resource")?;
        let right = match right.get("Set") {
            Some(Json::Array(all)) => {
                let all = all.iter().map(|one| match entity(one) {
                    Some((kind, id)) => self.entity_of(variable, kind, id, true),
                    None => Err("`in` takes a list of entities".into()),
                });
                json!({ "Set": all.collect::<Translated<Vec<Json>>>()? })
            }
            _ => match entity(right) {
                Some((kind, id)) => self.entity_of(variable, kind, id, true)?,
                None => return Err("`in` takes an entity, or a list of them".into()),
            },
        };
        Ok(json!({ "in": { "left": left.clone(), "right": right } }))
    }

    fn entity_of(&mut self, variable: &str, kind: &str, id: &str, is_in: bool) -> Translated {
        let (kind, id) = self.named(variable, kind, id, is_in)?;
        Ok(entity_json(kind, &id))
    }

    /// Translates an entity in a rule. `is_in`: the entity stands for everything below it, too.
    ///
    /// # Errors
    /// The entity is not known at the provider.
    pub fn named(&mut self, variable: &str, kind: &str, id: &str, is_in: bool) -> Translated<(&'static str, String)> {
        match (variable, kind) {
            ("principal", "User") => {
                let token = self.tokens.person(id);
                self.vocabulary.insert(token.clone());
                Ok((PERSON, token))
            }
            ("action", "Action") if id.parse::<Action>().is_ok() => Ok(("Action", id.into())),
            // Cedar compares names byte by byte, so a key must have one spelling.
            ("resource", "Key" | "Stored") if id.ends_with('/') => {
                Err(format!("{kind}::{id:?}: a key or folder is written without a slash at its end"))
            }
            ("resource", "Key") => self.names.seal(id).map(|key| (KEY, key)).map_err(|error| error.to_string()),
            ("resource", "Stored") if is_in => match parts_of(id) {
                Ok(_) => Ok((KEY, id.into())),
                Err(what) => Err(format!("{kind}::{id:?}: {what}")),
            },
            ("resource", "Stored") => Err("a key as it is stored is asked for by `in`".into()),
            _ => Err(format!("{variable} cannot be {kind}::{id:?}")),
        }
    }
}

/// The interval that holds one number.
fn one(number: i64) -> Interval {
    (Some(number), number.checked_add(1))
}

/// The comparison operator with both sides exchanged.
fn turned(operator: &str) -> &str {
    match operator {
        "<" => ">",
        "<=" => ">=",
        ">" => "<",
        _ => "<=",
    }
}
