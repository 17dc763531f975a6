//! Variables in strings: `${NAME}`, `${NAME:-default}`, and `$$` for a dollar sign.

/// A variable that cannot be filled in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct VariableError {
    pub(crate) message: String,
    pub(crate) help: String,
}

/// Fills in every variable of a text. With `digits_only`, a value must be a plain number: in a limit, a variable may
/// change the figures, not the meaning.
pub(crate) fn expand(
    text: &str,
    variable: &dyn Fn(&str) -> Option<String>,
    digits_only: bool,
) -> Result<Option<String>, VariableError> {
    if !text.contains('$') {
        return Ok(None);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some(after) = after.strip_prefix('{') {
            let Some((inside, after)) = after.split_once('}') else {
                return Err(wrong(
                    "a variable that begins with ${ ends with }",
                    "write \"${NAME}\" or \"${NAME:-20}\"",
                ));
            };
            out.push_str(&value(inside, variable, digits_only)?);
            rest = after;
        } else {
            return Err(wrong("a lone $", "write \"$$\" for a dollar sign, or \"${NAME}\" for a variable"));
        }
    }
    out.push_str(rest);
    Ok(Some(out))
}

fn value(inside: &str, variable: &dyn Fn(&str) -> Option<String>, digits_only: bool) -> Result<String, VariableError> {
    let (name, default) = match inside.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inside, None),
    };
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !is_name {
        let message = format!("\"{name}\" is not the name of a variable");
        return Err(wrong(&message, "write \"${NAME}\" or \"${NAME:-20}\""));
    }
    let value = variable(name).filter(|value| !value.is_empty()).or_else(|| default.map(str::to_owned));
    let Some(value) = value else {
        let help = format!("set {name}, or give it a default: \"${{{name}:-…}}\"");
        return Err(wrong(&format!("the variable {name} is not set"), &help));
    };
    if digits_only && (value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_digit())) {
        // The value itself may be a secret that landed in the wrong variable: it is not repeated.
        let message = format!("the variable {name} must be digits in a limit");
        return Err(wrong(&message, &format!("set {name} to a whole number")));
    }
    Ok(value)
}

fn wrong(message: &str, help: &str) -> VariableError {
    VariableError { message: message.to_owned(), help: help.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Option<String> {
        match name {
            "MAX" => Some("30".to_owned()),
            "EMPTY" => Some(String::new()),
            "WORD" => Some("many".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn variables_are_filled_in() {
        let check = |text: &str, expect: &str| {
            let full = expand(text, &lookup, false).unwrap().unwrap_or_else(|| text.to_owned());
            assert_eq!(full, expect);
        };
        check("plain", "plain");
        check("${MAX}/min", "30/min");
        check("${MAX:-20}/min", "30/min");
        check("${NONE:-20}/min", "20/min");
        check("${EMPTY:-20}/min", "20/min");
        check("${NONE:-}", "");
        check("a $$5 note for ${WORD}", "a $5 note for many");
        check("$${MAX}", "${MAX}");
    }

    #[test]
    fn what_cannot_be_filled_in_is_named() {
        let check = |text: &str, digits, expect: &str| {
            let error = expand(text, &lookup, digits).unwrap_err();
            assert!(error.message.contains(expect), "{text}: {}", error.message);
        };
        check("${NONE}", false, "NONE is not set");
        check("${EMPTY}", false, "EMPTY is not set");
        check("${MAX", false, "ends with }");
        check("costs $5", false, "lone $");
        check("${a b}", false, "not the name");
        check("${}", false, "not the name");
        check("${WORD}/min", true, "WORD must be digits");
        check("${NONE:-x}/min", true, "NONE must be digits");
    }
}
