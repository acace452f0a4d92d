"""Constants on which Python, Triton and C++ must agree: Triton imports them, `csrc` repeats them, a test compares."""

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) = 4.9e8, whose square is still far within float32
SEQUENCE_LOG_RATIO_LIMIT = 80.0  # nats, for sums over a sequence; e^80 exceeds any bound, and is still a finite float32
BAD_PREFIX = 0.8  # a prefix is bad if its minimum is below this: Prefix-Ratio GRPO gives no number, this is its 1 - eps
SMALLEST_REST = 1e-8  # DPPO adds it to the probability of all tokens but the sampled one before it takes the logarithm
NEVER = 2**31 - 1  # index of the first trigger where there is none

# Histograms of log-ratios: a bin is the sign and the upper bits of |l| in float32, 16 bins per octave.
HISTOGRAM_SHIFT = 19  # leaves sign, exponent and 4 bits of the mantissa
HISTOGRAM_BASE = 1807  # one less than the shifted bits of 2^-14; smaller |l| share the bin of 0
BINS_PER_SIGN = 293  # from 2^-14 to 20
BINS = 2 * BINS_PER_SIGN + 1

# M2PO's tie-break among equal |l|: (place of the sequence in the batch, position in the sequence).
POSITION_BITS = 22  # bits of each of the two numbers
LAST_PLACE = 2 ** (2 * POSITION_BITS) - 1

# Exact sums: values are rounded to integers, whose sum is the same in every order.
OUTSIDE = -1  # key of a token outside the trust region, as int32
SQUARE_SCALE = 2.0**30  # l^2 is an integer multiple of 1 / SQUARE_SCALE; l^2 <= 400, so 2^24 tokens fit into an int64
LARGEST_SQUARE = 2.0**10  # larger values are clamped to this
LIMB_BITS = 24  # a contribution of BAPO is three integers (limbs): multiples of 1, 2^-24 and 2^-48
LARGEST_CONTRIBUTION = 2.0**38  # larger values are clamped to this; 2^24 of them fit into an int64
