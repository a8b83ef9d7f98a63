//! Video instructions: single values selected from words, and parts of words side by side.

use super::{Check, Corpus, Random};

const PARTS: [&str; 7] = ["", ".b0", ".b1", ".b2", ".b3", ".h0", ".h1"];
const TYPES: [&str; 2] = ["u32", "s32"];

/// Whether an H200 deviates from PTX for this instruction in a way for which no rule was found.
fn refused(text: &str) -> bool {
    let saturates = text.contains(".sat");
    let larger = saturates || text.contains(".min %d") || text.contains(".max %d");
    // The types of the result and sources; comparisons name only the sources'.
    let types: Vec<&str> = text.split(['.', ' ']).filter(|w| TYPES.contains(w)).collect();
    let operands = text.split(' ').skip(2).map(|w| w.trim_end_matches(','));
    let mut sources = types[1..].iter().zip(operands);
    text.contains("vshl") && saturates
        || text.contains("vmad") && (saturates || text.contains(".shr")) && types[1..] != ["s32", "s32"]
        || text.contains("vsub.")
            && larger
            && types != ["u32"; 3]
            && sources.any(|(ty, operand)| *ty == "u32" && !operand.contains('.'))
}

/// Every video instruction with some choices of types and operand parts.
pub fn video(c: &mut Corpus) {
    let mut r = Random(0x9e37_79b9_7f4a_7c15);
    fn pick<'a>(r: &mut Random, from: &[&'a str]) -> &'a str {
        from[r.below(from.len())]
    }
    let mut add = |text: String| {
        if refused(&text) {
            return;
        }
        c.work(
            &text,
            &format!("mov.b32 %d, %c; {text};"),
            &["b32", "b32", "b32"],
            "b32",
            false,
            Check::Exact,
        );
    };
    for op in ["vadd", "vsub", "vabsdiff", "vmin", "vmax"] {
        for to in TYPES {
            for of in ["u32.u32", "s32.s32", "u32.s32", "s32.u32"] {
                for sat in ["", ".sat"] {
                    let head = format!("{op}.{to}.{of}{sat}");
                    add(format!("{head} %d, %a{}, %b{}", pick(&mut r, &PARTS), pick(&mut r, &PARTS)));
                    let second = pick(&mut r, &[".add", ".min", ".max"]);
                    add(format!(
                        "{head}{second} %d, %a{}, %b{}, %c",
                        pick(&mut r, &PARTS),
                        pick(&mut r, &PARTS)
                    ));
                    let part = pick(&mut r, &PARTS[1..]);
                    add(format!(
                        "{head} %d{part}, %a{}, %b{}, %c",
                        pick(&mut r, &PARTS),
                        pick(&mut r, &PARTS)
                    ));
                }
            }
        }
    }
    for op in ["vshl", "vshr"] {
        for to in TYPES {
            for of in TYPES {
                for mode in ["clamp", "wrap"] {
                    for sat in ["", ".sat"] {
                        let head = format!("{op}.{to}.{of}.u32{sat}.{mode}");
                        let amount = pick(&mut r, &["", ".b0", ".b1", ".h0"]);
                        add(format!(
                            "and.b32 %x1, %b, 0x00ff3f3f; {head} %d, %a{}, %x1{amount}",
                            pick(&mut r, &PARTS)
                        ));
                        let second = pick(&mut r, &[".add", ".min", ".max"]);
                        add(format!(
                            "and.b32 %x1, %b, 0x3f; {head}{second} %d, %a{}, %x1, %c",
                            pick(&mut r, &PARTS)
                        ));
                        let part = pick(&mut r, &PARTS[1..]);
                        add(format!(
                            "and.b32 %x1, %b, 0x1f; {head} %d{part}, %a{}, %x1, %c",
                            pick(&mut r, &PARTS)
                        ));
                    }
                }
            }
        }
    }
    for to in TYPES {
        for of in ["u32.u32", "s32.s32", "u32.s32", "s32.u32"] {
            for sat in ["", ".sat"] {
                for shift in ["", ".shr7", ".shr15"] {
                    let parts = (pick(&mut r, &PARTS), pick(&mut r, &PARTS));
                    add(format!("vmad.{to}.{of}{sat}{shift} %d, %a{}, %b{}, %c", parts.0, parts.1));
                    let parts = (pick(&mut r, &PARTS), pick(&mut r, &PARTS));
                    add(format!("vmad.{to}.{of}.po{sat}{shift} %d, %a{}, %b{}, %c", parts.0, parts.1));
                    // The sign of the product and that of the addend.
                    let minus = pick(&mut r, &["-%a", "%a -", "%a %b -"]);
                    let operands = match minus {
                        "-%a" => "-%a.h0, %b.h1, %c",
                        "%a -" => "%a.h1, -%b, %c",
                        _ => "%a, %b.h0, -%c",
                    };
                    if to == "s32" {
                        add(format!("vmad.{to}.{of}{sat}{shift} %d, {operands}"));
                    }
                }
            }
        }
    }
    for of in ["u32.u32", "s32.s32", "u32.s32"] {
        for cmp in ["eq", "ne", "lt", "le", "gt", "ge"] {
            add(format!("vset.{of}.{cmp} %d, %a{}, %b{}", pick(&mut r, &PARTS), pick(&mut r, &PARTS)));
            let second = pick(&mut r, &[".add", ".min", ".max"]);
            add(format!(
                "vset.{of}.{cmp}{second} %d, %a{}, %b{}, %c",
                pick(&mut r, &PARTS),
                pick(&mut r, &PARTS)
            ));
            let part = pick(&mut r, &PARTS[1..]);
            add(format!(
                "vset.{of}.{cmp} %d{part}, %a{}, %b{}, %c",
                pick(&mut r, &PARTS),
                pick(&mut r, &PARTS)
            ));
        }
    }
    // Side by side.
    for op in ["vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset"] {
        for (parts, masks) in [
            ("2", &[".h0", ".h1", ".h10"][..]),
            ("4", &[".b0", ".b2", ".b10", ".b31", ".b210", ".b3210"][..]),
        ] {
            for of in ["u32.u32", "s32.s32", "u32.s32", "s32.u32"] {
                let (to, tail) = match op {
                    "vset" => {
                        (String::new(), format!(".{}", pick(&mut r, &["eq", "ne", "lt", "le", "gt", "ge"])))
                    }
                    _ => (format!(".{}", pick(&mut r, &TYPES)), pick(&mut r, &["", ".sat"]).to_string()),
                };
                let mut choice = || match parts {
                    "2" => (0..2).fold(String::from(".h"), |s, _| format!("{s}{}", r.below(4))),
                    _ => (0..4).fold(String::from(".b"), |s, _| format!("{s}{}", r.below(8))),
                };
                let chosen = (choice(), choice());
                let mask = pick(&mut r, masks);
                add(format!("{op}{parts}{to}.{of}{tail} %d, %a, %b, %c"));
                add(format!("{op}{parts}{to}.{of}{tail} %d{mask}, %a{}, %b{}, %c", chosen.0, chosen.1));
                let sum = if tail == ".sat" { "" } else { tail.as_str() };
                add(format!("{op}{parts}{to}.{of}{sum}.add %d{mask}, %a, %b{}, %c", chosen.1));
            }
        }
    }
}
