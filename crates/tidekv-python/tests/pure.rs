//! The parts of the native module that know nothing of Python, compiled without it.

#![forbid(unsafe_code)]

#[path = "../src/dtype.rs"]
mod dtype;
#[path = "../src/strided.rs"]
mod strided;

use dtype::{DTYPES, Dtype};
use proptest::prelude::*;
use strided::Strided;

#[test]
fn every_type_is_found_by_its_name_and_torchs() {
    for dtype in DTYPES {
        assert_eq!(Dtype::named(dtype.name), Some(dtype));
        assert_eq!(Dtype::named(&format!("torch.{}", dtype.name)), Some(dtype));
        assert_eq!(u32::from(dtype.bits()), dtype.bytes * 8);
    }
    assert_eq!(Dtype::named("float7"), None);
}

#[test]
fn what_leaves_the_range_is_refused_with_a_reason() {
    let int16 = Dtype::named("int16").unwrap();
    let refused = |offset, shape: &[i64], strides: Option<&[i64]>| {
        Strided::within(64, offset, int16, shape.to_vec(), strides.map(<[i64]>::to_vec)).unwrap_err()
    };
    assert!(refused(0, &[33], None).contains("ends at byte 66"));
    assert!(refused(1, &[1], None).contains("multiple of 2"));
    assert!(refused(0, &[-1], None).contains("negative"));
    assert!(refused(0, &[2, 2], Some(&[1])).contains("one for each"));
    assert!(refused(0, &[2], Some(&[-1])).contains("backwards"));
    assert!(refused(0, &[1, i64::MAX, i64::MAX], None).contains("more elements"));
    assert!(refused(0, &[i64::MAX], Some(&[i64::MAX])).contains("beyond all addresses"));
    assert!(Strided::within(64, 64, int16, vec![0], None).is_ok(), "nothing fits everywhere");
    assert!(Strided::within(64, 0, int16, vec![4, 8], None).is_ok());
}

proptest! {
    /// The check against a walk over every element.
    #[test]
    fn a_view_fits_exactly_where_all_its_elements_do(
        limit in 0u64..400,
        offset in 0u64..100,
        dims in prop::collection::vec((0i64..5, 0i64..40), 0..4),
        dtype in 0..DTYPES.len(),
    ) {
        let dtype = DTYPES[dtype];
        let (shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        let fits = Strided::within(limit, offset, dtype, shape.clone(), Some(strides.clone())).is_ok();

        let mut places = vec![0i64];
        for (&size, &stride) in shape.iter().zip(&strides) {
            places = (0..size).flat_map(|i| places.iter().map(move |place| place + i * stride)).collect();
        }
        let bytes = u64::from(dtype.bytes);
        let end = |place: &i64| offset + (u64::try_from(*place).unwrap() + 1) * bytes;
        let all_inside = places.iter().all(|place| end(place) <= limit);
        let aligned = offset.is_multiple_of(bytes);
        // A view of nothing must still begin inside.
        let begins_inside = offset <= limit;
        prop_assert_eq!(fits, aligned && begins_inside && all_inside);
    }

    #[test]
    fn without_strides_a_view_is_dense(shape in prop::collection::vec(1i64..6, 0..4)) {
        let view = Strided::within(1 << 20, 0, Dtype::BYTES, shape.clone(), None).unwrap();
        let elements: i64 = shape.iter().product();
        prop_assert_eq!(view.element_bytes(), u64::try_from(elements).unwrap());
        let last: i64 = shape.iter().zip(&view.strides).map(|(size, stride)| (size - 1) * stride).sum();
        prop_assert_eq!(last, elements - 1);
    }
}
