/** Counts as people read them. */

const whole = new Intl.NumberFormat("en");

export const formatCount = (value) => whole.format(value);

export const plural = (n, one, many = `${one}s`) => `${formatCount(n)} ${n === 1 ? one : many}`;
