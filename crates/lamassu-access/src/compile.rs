//! Compiles rules in Cedar over plain attributes to rules over tokens. The provider gets only the latter.

use crate::attribute::schema;
use crate::expression::{KEY, PERSON, Translator};
use crate::names::Names;
use crate::token::{Cuts, TokenKey};
use crate::{AccessError, Declarations, Result};
use cedar_policy::{Policy, PolicyId, PolicySet, ValidationMode, Validator};
use data_encoding::HEXLOWER;
use lamassu_crypto::wrap;
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// Maximum nesting of values in a compiled statement. A bundle's JSON is read to a depth of 128.
const DEPTH_MAX: usize = 100;
/// Most `&&`, `||` and `!` in one statement, and maximum nesting of its brackets: Cedar's parser and the translation
/// recurse for each.
const OPERATORS_MAX: usize = 40;
const BRACKETS_MAX: usize = 20;
/// Most statements in all rules together: the limit of a proxy.
pub const STATEMENTS_MAX: usize = 10_000;

/// Rules by name. Each is Cedar text with one or more statements.
pub type Rules = BTreeMap<String, String>;

/// Compiled rules: the part that is published, and the part that credentials are made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// statements in Cedar's JSON format, without names, comments and annotations; their order reveals nothing
    pub policies: Vec<Json>,
    /// tokens that the statements ask for: a credential carries no others
    pub vocabulary: BTreeSet<String>,
    /// numbers that attributes are compared with
    pub cuts: Cuts,
}

impl Compiled {
    /// Identifies the vocabulary. A credential made for another vocabulary may lack a token that a rule now forbids by,
    /// so the proxy refuses it.
    pub fn vocabulary_digest(&self) -> String {
        let all: Vec<&str> = self.vocabulary.iter().map(String::as_str).collect();
        HEXLOWER.encode(&wrap::sha256(all.join("\n").as_bytes())[..16])
    }
}

/// Parses the statements of a rule and validates them against the declared attributes.
///
/// # Errors
/// [`AccessError::Rule`].
pub fn parse(rule: &str, text: &str, declared: &Declarations) -> Result<Vec<Policy>> {
    let wrong = |detail: String| AccessError::Rule { rule: rule.into(), detail };
    if is_too_deep(text) {
        return Err(wrong(format!(
            "a statement has more than {OPERATORS_MAX} of &&, || and !, or more than {BRACKETS_MAX} brackets in one \
             another: {SPLIT}"
        )));
    }
    let set = PolicySet::from_str(text).map_err(|errors| wrong(in_lines(text, &errors)))?;
    if set.templates().next().is_some() {
        return Err(wrong("a template, with ?principal or ?resource, is no rule".into()));
    }
    let validated = Validator::new(schema(declared)?).validate(&set, ValidationMode::default());
    if let Some(error) = validated.validation_errors().next() {
        return Err(wrong(error.to_string()));
    }
    let policies: Vec<Policy> = set.policies().cloned().collect();
    match policies.is_empty() {
        true => Err(wrong("it has no statement; `permit(principal, action, resource) when { … };` is one".into())),
        false => Ok(policies),
    }
}

/// Advice for a condition that is too large.
const SPLIT: &str = "write several statements instead, or a list with contains";

/// Whether a text must not be parsed. Characters within string literals and comments count, too.
fn is_too_deep(text: &str) -> bool {
    let mut depth = 0_usize;
    let deepest = text.chars().fold(0, |deepest, c| {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest.max(depth)
    });
    let operators =
        |statement: &str| ["&&", "||", "!"].iter().map(|sign| statement.matches(sign).count()).sum::<usize>();
    deepest > BRACKETS_MAX || text.split(';').any(|statement| operators(statement) > OPERATORS_MAX)
}

/// Nesting depth of a JSON value.
fn depth(value: &Json) -> usize {
    match value {
        Json::Array(all) => 1 + all.iter().map(depth).max().unwrap_or_default(),
        Json::Object(all) => 1 + all.values().map(depth).max().unwrap_or_default(),
        _ => 1,
    }
}

fn in_lines(text: &str, errors: &cedar_policy::ParseErrors) -> String {
    let all = errors.iter().map(|error| {
        use miette::Diagnostic;
        let at = error.labels().and_then(|mut labels| labels.next()).map(|label| label.offset());
        let before = at.and_then(|at| text.get(..at));
        match before {
            Some(before) => format!("line {}: {error}", before.matches('\n').count() + 1),
            None => error.to_string(),
        }
    });
    all.collect::<Vec<_>>().join("; ")
}

/// All statements of all rules, for decisions over plain attributes.
///
/// # Errors
/// [`AccessError::Rule`].
pub fn plain(rules: &Rules, declared: &Declarations) -> Result<PolicySet> {
    let mut all = PolicySet::new();
    for (name, text) in rules {
        for (at, policy) in parse(name, text, declared)?.into_iter().enumerate() {
            let wrong = |error: cedar_policy::PolicySetError| AccessError::Rule {
                rule: name.clone(),
                detail: error.to_string(),
            };
            all.add(policy.new_id(PolicyId::new(format!("{name} {at}")))).map_err(wrong)?;
        }
    }
    Ok(all)
}

/// Compiles rules.
///
/// # Errors
/// [`AccessError::Rule`].
pub fn compile(rules: &Rules, declared: &Declarations, tokens: &TokenKey, names: &Names) -> Result<Compiled> {
    let mut translator =
        Translator { declared, tokens, names, cuts: Cuts::new(), is_collecting: true, vocabulary: BTreeSet::new() };
    let mut parsed = Vec::new();
    for (name, text) in rules {
        for policy in parse(name, text, declared)? {
            let wrong = |detail: String| AccessError::Rule { rule: name.clone(), detail };
            let plain = policy.to_json().map_err(|error| wrong(error.to_string()))?;
            translate(&mut translator, &plain).map_err(wrong)?;
            parsed.push((name, plain));
        }
    }
    (translator.is_collecting, translator.vocabulary) = (false, BTreeSet::new());
    let mut policies = Vec::new();
    for (name, plain) in parsed {
        let wrong = |detail: String| AccessError::Rule { rule: name.clone(), detail };
        let translated = translate(&mut translator, &plain).map_err(wrong)?;
        if depth(&translated) > DEPTH_MAX {
            return Err(wrong(format!("a condition has too many operators within one another: {SPLIT}")));
        }
        if policies.len() >= STATEMENTS_MAX {
            return Err(wrong(format!("there are more than {STATEMENTS_MAX} statements in all rules")));
        }
        policies.push(translated);
    }
    policies.sort_by_cached_key(Json::to_string);
    policies.dedup();
    Ok(Compiled { policies, vocabulary: translator.vocabulary, cuts: translator.cuts })
}

fn translate(to: &mut Translator<'_>, from: &Json) -> std::result::Result<Json, String> {
    let scopes =
        ["principal", "action", "resource"].map(|variable| Ok((variable, scope(to, variable, &from[variable])?)));
    let mut policy = json!({ "effect": from["effect"] });
    for scope in scopes {
        let (variable, scope) = scope.map_err(|error: String| error)?;
        policy[variable] = scope;
    }
    let empty = Vec::new();
    let conditions = from["conditions"]
        .as_array()
        .unwrap_or(&empty)
        .iter()
        .map(|condition| Ok(json!({ "kind": condition["kind"], "body": to.boolean(&condition["body"])? })));
    policy["conditions"] = Json::Array(conditions.collect::<std::result::Result<_, String>>()?);
    Ok(policy)
}

fn scope(to: &mut Translator<'_>, variable: &str, from: &Json) -> std::result::Result<Json, String> {
    let mut named = |entity: &Json, is_in: bool| {
        let text = |name: &str| entity[name].as_str().unwrap_or_default();
        let (kind, id) = to.named(variable, text("type"), text("id"), is_in)?;
        Ok::<_, String>(json!({ "type": kind, "id": id }))
    };
    match from["op"].as_str() {
        Some("All") => Ok(json!({ "op": "All" })),
        Some("==") => Ok(json!({ "op": "==", "entity": named(&from["entity"], false)? })),
        Some("in") => match from["entities"].as_array() {
            Some(all) => {
                let all = all.iter().map(|entity| named(entity, true)).collect::<std::result::Result<Vec<_>, _>>()?;
                Ok(json!({ "op": "in", "entities": all }))
            }
            None => Ok(json!({ "op": "in", "entity": named(&from["entity"], true)? })),
        },
        Some("is") => {
            let kind = match (variable, from["entity_type"].as_str()) {
                ("principal", Some("User")) => PERSON,
                ("resource", Some("Key")) => KEY,
                _ => return Err(format!("{variable} is of another type")),
            };
            match from.get("in") {
                None => Ok(json!({ "op": "is", "entity_type": kind })),
                Some(of) => {
                    let entity = named(&of["entity"], true)?;
                    Ok(json!({ "op": "is", "entity_type": kind, "in": { "entity": entity } }))
                }
            }
        }
        _ => Err(format!("the scope of {variable} cannot be decided on tokens")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AttributeKind;
    use lamassu_crypto::Secret;

    fn declared() -> Declarations {
        [
            ("dept".into(), AttributeKind::Text),
            ("projects".into(), AttributeKind::Set),
            ("level".into(), AttributeKind::Number),
        ]
        .into()
    }

    fn compiled(text: &str) -> Result<Compiled> {
        let root = Secret::new(&mut [1; 32]);
        let rules = [("r".to_owned(), text.to_owned())].into();
        compile(&rules, &declared(), &TokenKey::of(&root, 1), &Names::of(&root))
    }

    #[test]
    fn nothing_plain_is_in_what_is_published() {
        let text = "// the finance department\n@id(\"finance rule\")\npermit(principal == User::\"alice\", action in \
            [Action::\"read\", Action::\"list\"], resource in Key::\"reports/q1\") when { principal has dept && \
            [\"finance\", \"audit\"].contains(principal.dept) && principal.projects.containsAny([\"apollo\"]) } unless \
            { principal has level && principal.level < 1234 };";
        let all = compiled(text).expect("compiles");
        let said = serde_json::to_string(&all.policies).expect("JSON");
        for plain in ["alice", "reports", "q1", "dept", "finance", "audit", "projects", "apollo", "level", "1234"] {
            assert!(!said.contains(plain), "{plain}: {said}");
        }
        assert_eq!(all.cuts["level"], [1234].into());
        assert_eq!(all.vocabulary.len(), 7);
        // The second pass depends on the cuts of all rules.
        assert_eq!(compiled(text).expect("compiles"), all);
        for (at, policy) in all.policies.iter().enumerate() {
            Policy::from_json(Some(PolicyId::new(at.to_string())), policy.clone()).expect("Cedar takes it");
        }
    }

    /// Compiled rules can be read again: from the manager's database, and by a proxy.
    #[test]
    fn large_conditions_are_refused_or_can_be_read() {
        let chain = |operator: &str, count: usize| {
            let all = vec!["principal.projects.contains(\"a\")"; count].join(operator);
            format!("permit(principal, action, resource) when {{ {all} }};")
        };
        let mut refused = 0;
        for count in [1, 10, 40, 45, 48, 50, 55, 60, 62, 100, 150, 300, 900] {
            for operator in [" || ", " && "] {
                match compiled(&chain(operator, count)) {
                    Ok(all) => {
                        let kept = serde_json::to_vec(&serde_json::json!({ "standing": [{ "all": all.policies }] }));
                        serde_json::from_slice::<Json>(&kept.expect("JSON")).expect("it can be read");
                    }
                    Err(error) => {
                        assert!(error.to_string().contains("several statements"), "{error}");
                        refused += 1;
                    }
                }
            }
        }
        assert!((4..=20).contains(&refused), "{refused}");
        let deep =
            format!("permit(principal, action, resource) when {{ {}true{} }};", "(".repeat(3000), ")".repeat(3000));
        compiled(&deep).expect_err("too deep");
        let not = format!("permit(principal, action, resource) when {{ {}true }};", "! ".repeat(3000));
        compiled(&not).expect_err("too deep");
    }

    #[test]
    fn what_tokens_cannot_express_is_refused_by_name() {
        let when = |condition: &str| format!("permit(principal, action, resource) when {{ {condition} }};");
        for (text, said) in [
            ("permit(principal".to_owned(), "line 1"),
            (String::new(), "no statement"),
            (when("principal.dept == \"x\""), "dept"),
            (when("principal has colour"), "colour"),
            (when("principal has dept && principal.dept like \"fin*\""), "like"),
            (when("principal has level && principal.level + 1 > 3"), "number with a literal"),
            (when("principal.projects == [\"a\"]"), "literal"),
            ("permit(principal in Group::\"a\", action, resource);".into(), "Group"),
            ("permit(principal, action == Action::\"burn\", resource);".into(), "burn"),
            ("permit(principal, action, resource in Key::\"a//b\");".into(), "slash"),
            ("permit(principal, action, resource in Key::\"a/\");".into(), "without a slash"),
            ("permit(principal, action, resource == Stored::\"a\");".into(), "as it is stored"),
            ("permit(principal == ?principal, action, resource);".into(), "template"),
        ] {
            let error = compiled(&text).expect_err(&text).to_string();
            assert!(error.starts_with("rule \"r\"") && error.contains(said), "{text}: {error}");
        }
    }
}
