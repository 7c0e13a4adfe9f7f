//! The decision over tokens is the decision of Cedar over plain attributes: for random rules, people, keys.

use lamassu_access::compile::{self, Rules};
use lamassu_access::names::Names;
use lamassu_access::token::TokenKey;
use lamassu_access::{Action, AttributeKind, Attributes, Bundle, Claims, Decider, Declarations, Value, attribute};
use lamassu_crypto::Secret;
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

const TEXTS: [&str; 4] = ["finance", "law", "", "a \\\"b\\\""];
const PROJECTS: [&str; 3] = ["apollo", "zeus", "law"];
const PEOPLE: [&str; 3] = ["alice", "bob", "eve"];
const KEYS: [&str; 6] = ["a", "a/b", "a/b/c", "ab", "b/a", "c/d/e"];
const NUMBERS: [i64; 7] = [i64::MIN, -5, 0, 3, 4, i64::MAX - 1, i64::MAX];

fn root() -> Secret<32> {
    Secret::new(&mut [9; 32])
}

fn declared() -> Declarations {
    [
        ("dept".into(), AttributeKind::Text),
        ("projects".into(), AttributeKind::Set),
        ("level".into(), AttributeKind::Number),
    ]
    .into()
}

fn number() -> impl Strategy<Value = String> {
    // -9223372036854775808 is no literal of Cedar's grammar by itself everywhere: it is left to `people`.
    select(NUMBERS.to_vec()).prop_map(|number| number.max(i64::MIN + 1).to_string())
}

fn list(of: &'static [&'static str]) -> impl Strategy<Value = String> {
    vec(select(of), 1..3).prop_map(|all| {
        let all: Vec<String> = all.iter().map(|text| format!("\"{text}\"")).collect();
        format!("[{}]", all.join(", "))
    })
}

fn leaf() -> impl Strategy<Value = String> {
    let operator = select(vec!["==", "!=", "<", "<=", ">", ">="]);
    let equality = select(vec!["==", "!="]);
    let entity = select(vec!["==", "!="]);
    let stored = select(KEYS.to_vec()).prop_map(|key| Names::of(&root()).seal(key).expect("a key"));
    prop_oneof![
        Just("principal has dept".to_owned()),
        Just("principal has projects".to_owned()),
        Just("principal has level".to_owned()),
        (equality, select(TEXTS.to_vec()), any::<bool>()).prop_map(|(operator, text, turned)| match turned {
            true => format!("(principal has dept && \"{text}\" {operator} principal.dept)"),
            false => format!("(principal has dept && principal.dept {operator} \"{text}\")"),
        }),
        list(&TEXTS).prop_map(|all| format!("(principal has dept && {all}.contains(principal.dept))")),
        select(PROJECTS.to_vec()).prop_map(|text| format!("principal.projects.contains(\"{text}\")")),
        list(&PROJECTS).prop_map(|all| format!("principal.projects.containsAny({all})")),
        list(&PROJECTS).prop_map(|all| format!("principal.projects.containsAll({all})")),
        (operator, number(), any::<bool>()).prop_map(|(operator, number, turned)| match turned {
            true => format!("(principal has level && {number} {operator} principal.level)"),
            false => format!("(principal has level && principal.level {operator} {number})"),
        }),
        (number(), number())
            .prop_map(|(a, b)| format!("(principal has level && [{a}, {b}].contains(principal.level))")),
        number().prop_map(|number| format!("(!(principal has level) || principal.level < {number})")),
        (entity, select(PEOPLE.to_vec())).prop_map(|(is, person)| format!("principal {is} User::\"{person}\"")),
        select(KEYS.to_vec()).prop_map(|key| format!("resource == Key::\"{key}\"")),
        select(KEYS.to_vec()).prop_map(|key| format!("resource in Key::\"{key}\"")),
        stored.prop_map(|key| format!("resource in Stored::\"{key}\"")),
        (select(KEYS.to_vec()), select(KEYS.to_vec()))
            .prop_map(|(a, b)| format!("resource in [Key::\"{a}\", Key::\"{b}\"]")),
        select(Action::ALL.to_vec()).prop_map(|action| format!("action == Action::\"{}\"", action.name())),
        Just("action in [Action::\"read\", Action::\"list\"]".to_owned()),
        Just("principal is User".to_owned()),
        any::<bool>().prop_map(|value| value.to_string()),
    ]
}

fn condition() -> impl Strategy<Value = String> {
    leaf().prop_recursive(3, 12, 2, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a} && {b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a} || {b})")),
            inner.clone().prop_map(|a| format!("!({a})")),
            (inner.clone(), inner.clone(), inner).prop_map(|(a, b, c)| format!("(if {a} then {b} else {c})")),
        ]
    })
}

fn statement() -> impl Strategy<Value = String> {
    let principal = prop_oneof![
        4 => Just("principal".to_owned()),
        1 => Just("principal is User".to_owned()),
        1 => select(PEOPLE.to_vec()).prop_map(|person| format!("principal == User::\"{person}\"")),
    ];
    let action = prop_oneof![
        2 => Just("action".to_owned()),
        1 => Just("action == Action::\"read\"".to_owned()),
        1 => Just("action in [Action::\"write\", Action::\"delete\"]".to_owned()),
    ];
    let resource = prop_oneof![
        2 => Just("resource".to_owned()),
        1 => select(KEYS.to_vec()).prop_map(|key| format!("resource == Key::\"{key}\"")),
        2 => select(KEYS.to_vec()).prop_map(|key| format!("resource in Key::\"{key}\"")),
        1 => select(KEYS.to_vec()).prop_map(|key| format!("resource is Key in Key::\"{key}\"")),
    ];
    let conditions = vec((select(vec!["when", "unless"]), condition()), 0..3);
    (select(vec!["permit", "permit", "forbid"]), principal, action, resource, conditions).prop_map(
        |(effect, principal, action, resource, conditions)| {
            let conditions: Vec<String> =
                conditions.into_iter().map(|(kind, body)| format!(" {kind} {{ {body} }}")).collect();
            format!("{effect}({principal}, {action}, {resource}){};", conditions.concat())
        },
    )
}

fn person() -> impl Strategy<Value = Attributes> {
    let dept = option::of(select(TEXTS.to_vec()));
    let level = option::of(select(NUMBERS.to_vec()));
    (dept, option::of(btree_set(select(PROJECTS.to_vec()), 0..3)), level).prop_map(|(dept, projects, level)| {
        let mut all = Attributes::new();
        all.extend(dept.map(|text| ("dept".to_owned(), Value::Text(text.replace('\\', "")))));
        let set = |all: std::collections::BTreeSet<&str>| Value::Set(all.into_iter().map(String::from).collect());
        all.extend(projects.map(|projects| ("projects".to_owned(), set(projects))));
        all.extend(level.map(|level| ("level".to_owned(), Value::Number(level))));
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn decisions_over_tokens_are_those_over_attributes(
        statements in vec(statement(), 1..5),
        people in vec((select(PEOPLE.to_vec()), person()), 1..4),
        epoch in 0_u64..3,
    ) {
        let (declared, root) = (declared(), root());
        let (tokens, names) = (TokenKey::of(&root, epoch), Names::of(&root));
        let rules: Rules = statements.iter().enumerate().map(|(at, text)| (at.to_string(), text.clone())).collect();
        // The validator refuses some: what it refuses nobody can publish. Those do not count as cases.
        let plain = compile::plain(&rules, &declared);
        prop_assume!(plain.is_ok());
        let plain = plain.expect("it is");
        let compiled = compile::compile(&rules, &declared, &tokens, &names).expect("what is valid compiles");
        let vocabulary = compiled.vocabulary_digest();
        let said = serde_json::to_string(&compiled.policies).expect("JSON");
        for text in ["finance", "apollo", "alice", "dept", "projects", "level"] {
            prop_assert!(!said.contains(text), "{}: {}", text, said);
        }
        let policies = compiled.policies.clone();
        let bundle = Bundle { seq: 1, epoch, vocabulary: vocabulary.clone(), time: 0, policies };
        let decider = Decider::of(bundle).expect("Cedar takes it");
        for (name, attributes) in &people {
            let all = tokens.of_attributes(&declared, attributes, &compiled.cuts);
            let person = tokens.person(name);
            let claims = Claims {
                id: "0".repeat(32),
                sub: if compiled.vocabulary.contains(&person) { person } else { "anybody".into() },
                tokens: all.intersection(&compiled.vocabulary).cloned().collect(),
                epoch,
                vocabulary: vocabulary.clone(),
                begins: 0,
                ends: 1,
                told: String::new(),
            };
            for action in Action::ALL {
                for key in KEYS {
                    let stored = names.seal(key).expect("a key");
                    let expected = attribute::decide(&plain, &declared, (name, attributes), action, (key, &stored));
                    prop_assert_eq!(
                        decider.allows(&claims, action, &stored),
                        expected.expect("decides"),
                        "{:?} {:?} {} {} {:?}", name, attributes, action.name(), key, statements
                    );
                }
            }
        }
    }
}
