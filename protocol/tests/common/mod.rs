//! What several tests read from the schema.

use std::collections::BTreeMap;

use protocol::ops;
use protocol::schema::{Field, Shape};

/// The structures of operations and of their bulk data, by name.
pub fn structures() -> BTreeMap<&'static str, &'static [Field]> {
    let mut found = BTreeMap::new();
    for row in ops::all() {
        row.request.iter().chain(row.reply).for_each(|field| collect(&field.shape, &mut found));
    }
    ops::DATA_SHAPES.iter().for_each(|(_, shape)| collect(shape, &mut found));
    found
}

fn collect(shape: &Shape, found: &mut BTreeMap<&'static str, &'static [Field]>) {
    match shape {
        Shape::Struct { name, fields } => {
            found.insert(name, fields);
            fields.iter().for_each(|field| collect(&field.shape, found));
        }
        Shape::Array { of, .. } | Shape::List { of } | Shape::Optional { of } => collect(of, found),
        Shape::Scalar { .. } | Shape::Bytes { .. } | Shape::Data { .. } => {}
    }
}
