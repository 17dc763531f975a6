//! `threshold init` and `threshold schema`: print a preset, a commented policy, or the JSON Schema of policies. All of them are
//! built into the program.

use anyhow::bail;

use crate::cli::InitArgs;
use threshold_rehearsal::Report;

/// The presets by name.
pub(crate) const PRESETS: [(&str, &str); 6] = [
    ("starter", include_str!("../policies/starter.toml")),
    ("telegram-bot", include_str!("../policies/telegram-bot.toml")),
    ("chat-tenants", include_str!("../policies/chat-tenants.toml")),
    ("weather-api", include_str!("../policies/weather-api.toml")),
    ("mail-sender", include_str!("../policies/mail-sender.toml")),
    ("grove", include_str!("../policies/grove.toml")),
];

/// The JSON Schema of a policy file, which editors read.
const SCHEMA: &str = include_str!("../policies/schema.json");

/// Prints the JSON Schema of a policy.
pub(crate) fn schema() -> Report {
    Report { text: SCHEMA.to_owned(), code: 0 }
}

pub(crate) fn run(args: &InitArgs) -> anyhow::Result<Report> {
    if args.list {
        let text = PRESETS.iter().map(|(name, text)| format!("{name:<14} {}\n", about(text))).collect();
        return Ok(Report { text, code: 0 });
    }
    let Some((_, text)) = PRESETS.iter().find(|(name, _)| *name == args.preset) else {
        let names: Vec<&str> = PRESETS.iter().map(|(name, _)| *name).collect();
        bail!("unknown preset \"{}\"; the presets are {}", args.preset, names.join(", "));
    };
    Ok(Report { text: with_schema_note(text), code: 0 })
}

/// Adds how to get the schema that the first line of a preset names.
fn with_schema_note(preset: &str) -> String {
    let (schema, rest) = preset.split_once('\n').unwrap_or((preset, ""));
    format!(
        "{schema}\n# For your editor: `threshold schema > schema.json` writes the file that this line names.\n{rest}"
    )
}

/// Returns the first sentence of a preset's opening comment.
fn about(text: &str) -> String {
    let comment = text.lines().skip_while(|line| line.starts_with("#:"));
    let words: Vec<&str> = comment.map_while(|line| line.strip_prefix('#')).map(str::trim).collect();
    let words = words.join(" ");
    words.split_once(". ").map_or(words.clone(), |(first, _)| first.to_owned()).trim_end_matches('.').trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use threshold_core::policy::Policy;

    #[test]
    fn every_preset_has_no_findings() {
        for (name, text) in PRESETS {
            let review = Policy::review(text, &|_| None);
            let rendered: Vec<String> = review.findings.iter().map(|finding| finding.render(name, text)).collect();
            assert!(review.policy.is_some() && rendered.is_empty(), "{}", rendered.join("\n"));
        }
    }

    #[test]
    fn every_preset_says_what_it_is_for() {
        for (name, text) in PRESETS {
            assert!(about(text).len() > 10, "{name}: {}", about(text));
        }
    }
}
