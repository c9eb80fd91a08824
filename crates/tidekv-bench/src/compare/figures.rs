//! The figures of a summary: every number in it, with the path that leads there.
//!
//! ```text
//!   {"map_us": {"p50": 31.2}, "rounds": [4, {"pages": 7}]}    ->    map_us.p50       31.2
//!                                                                   rounds.0         4
//!                                                                   rounds.1.pages   7
//! ```

use serde_json::{Map, Value};

/// One number of a summary.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Keys and array indices that lead to it. Kept apart, so that a key with a dot in it stays one key.
    pub path: Vec<String>,
    /// Its value.
    pub value: f64,
}

/// Every figure of `summary`, in the order of the file.
pub fn of_summary(summary: &Map<String, Value>) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut path = Vec::new();
    for (key, value) in summary {
        collect(key, value, &mut path, &mut figures);
    }
    figures
}

/// serde_json limits the depth of what it reads, so this recursion is bounded.
fn collect(key: &str, value: &Value, path: &mut Vec<String>, figures: &mut Vec<Figure>) {
    path.push(key.to_owned());
    match value {
        Value::Number(number) => {
            figures.extend(number.as_f64().map(|value| Figure { path: path.clone(), value }));
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                collect(&index.to_string(), item, path, figures);
            }
        }
        Value::Object(fields) => {
            for (key, field) in fields {
                collect(key, field, path, figures);
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
    path.pop();
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn paths(summary: &Value) -> Vec<(String, f64)> {
        let figures = of_summary(summary.as_object().unwrap());
        figures.into_iter().map(|figure| (figure.path.join("."), figure.value)).collect()
    }

    #[test]
    fn every_number_has_a_path_and_nothing_else_has() {
        let summary = json!({"z": 1, "map_us": {"p50": 31.5, "note": "x"}, "rounds": [4, {"pages": 7}], "ok": true});
        let expected = [("z", 1.0), ("map_us.p50", 31.5), ("rounds.0", 4.0), ("rounds.1.pages", 7.0)];
        assert_eq!(paths(&summary), expected.map(|(path, value)| (path.to_owned(), value)));
    }

    #[test]
    fn a_dot_in_a_key_is_not_a_level() {
        let figures = of_summary(json!({"a.b": 1, "a": {"b": 2}}).as_object().unwrap());
        assert_ne!(figures[0].path, figures[1].path);
    }
}
