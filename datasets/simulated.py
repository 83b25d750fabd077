"""Weather without a source: random fields, and simulated ones in the layout of ERA5.

The simulated atmosphere has two layers of shallow water on the rotating sphere.
Radiation drives jets that break into eddies, mountains deflect them, and vapour condenses in the lower layer.
The scheme is the semi-implicit leapfrog of Hoskins and Simmons (1975, doi 10.1002/qj.49710142918), for depths
instead of temperatures. Shapes: spectra (C, N, F, M) and grids (W, H, F, M) of F fields and M members.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
import xarray as xr
from scipy.special import assoc_legendre_p_all

from config import RANDOM, Data
from datasets.archive import TrainingStore
from datasets.channels import Channels
from datasets.grid import Grid, global_grid
from datasets.options import parse_period
from datasets.variables import units, usual_range
from errors import refuse

NOISE_DEVIATIONS = 12  # of random fields in the usual range of a variable
ONE_YEAR = np.timedelta64(365, "D")


@dataclass(frozen=True)
class Parameters:
    """Parameters of the atmosphere in SI units, chosen for jets of 20-50 m/s beyond marginal stability."""

    depth_upper: float = 8000.0  # m; the tilted interface between the layers must not reach the top
    depth_lower: float = 4000.0  # m; nor the ground, but baroclinic instability needs a thin lower layer
    density_ratio: float = 0.82  # upper over lower; reduced gravity g' = 0.18 g
    jet_north: float = 46.0  # m s-1, peak of the vertical shear in radiative equilibrium: northern winter
    jet_south: float = 44.0
    radiation_time: float = 20 * 86400.0  # s
    drag_time: float = 6 * 86400.0  # s, lower layer only
    diffusion_time: float = 4 * 3600.0  # s at wavenumber 21, growing as 1 / (n (n + 1))^4 below it
    evaporation_time: float = 4 * 86400.0  # s over sea; four times as long over land
    condensation_time: float = 4 * 3600.0  # s
    saturation: float = 24.0  # kg m-2 at the mean temperature: 50 in the tropics and 5 at the poles
    vapour_scale_height: float = 2500.0  # m: a column over a mountain contains less
    step: float = 2700.0  # s: 8 make 6 h; 90 m/s times wavenumber 21 stays below one radian a step
    filter_strength: float = 0.05  # Robert-Asselin
    spin_up_days: int = 85
    mountains: tuple[tuple[float, ...], ...] = (  # latitude, longitude, height (m), half width (degrees)
        (38.0, 90.0, 2200.0, 16.0),
        (45.0, 250.0, 1600.0, 14.0),
        (-25.0, 295.0, 1300.0, 14.0),
        (5.0, 25.0, 700.0, 18.0),
    )


DEFAULTS = Parameters()
VERSION = 1  # increase it whenever the same parameters result in a different record
NUM_YEARS, NUM_DAYS, FIRST_YEAR = 9, 100, 2001  # 1 January to 10 April of 2001..2009, with gaps in between
TRUNCATION, NUM_LAT, NUM_LON = 21, 32, 64  # 3 * 21 + 1 <= 64: products of two fields are not aliased
LATITUDE = -90 + 180 / NUM_LAT * (np.arange(NUM_LAT) + 0.5)  # degrees, of the record; no poles
LONGITUDE, RADIANS_EAST = (circle / NUM_LON * np.arange(NUM_LON) for circle in (360, 2 * np.pi))
ROTATION, GRAVITY, RADIUS = 7.292e-5, 9.80665, 6.371e6  # s-1, m s-2, m
LEVELS = (300, 850)  # hPa: names of the upper and the lower layer in the record


class SphericalHarmonics:
    """Spherical harmonic transforms between spectra (C, N, ...) and longitude-latitude grids (W, H, ...).

    They go up to wavenumber `truncation`. Grids are at sines of latitude `mu` (H,) and longitudes in radians
    (W,). Spectra have C = 2 N rows: coefficients of P_nm(mu) cos(m lon), m = 0..N-1, then of P_nm sin(m lon).
    P^2 integrates to 1 over mu. Analysis requires equidistant longitudes and Gaussian `weights` (H,).
    """

    def __init__(
        self, mu: np.ndarray, longitude: np.ndarray, truncation: int, weights=None, dtype=torch.float64
    ) -> None:
        def cast(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

        n, mu = truncation, mu.clip(-1 + 1e-12, 1 - 1e-12)  # scipy 1.17 ignores `norm` at 1
        legendre, slope = assoc_legendre_p_all(n, n, mu, norm=True, diff_n=1)  # at m = 0..n, then m < 0
        table = np.concatenate([legendre, (1 - mu**2) * slope])  # finite at the poles
        table = np.tile(table[:, : n + 1].transpose(1, 2, 0), (2, 1, 1))  # (C, H, 2 N)
        number = np.arange(n + 1.0)
        angle = number[:, None] * longitude
        waves = np.concatenate([np.cos(angle), np.sin(angle)])  # (C, W)
        self.zonal_number, self.laplacian = cast(number), cast(-number * (number + 1) / RADIUS**2)  # (N,)
        self.inverse_laplacian = cast(-(RADIUS**2) / np.maximum(number * (number + 1), 1.0) * (number > 0))
        self.to_latitude, self.to_longitude = cast(table), cast(waves.T)
        if weights is not None:
            norm = np.where(np.arange(2 * n + 2) % (n + 1) == 0, 1.0, 2.0) / len(longitude)
            self.from_longitude = cast(waves * norm[:, None])
            self.from_latitude = cast((table * (weights / (1 - mu**2))[:, None]).transpose(0, 2, 1))

    def differentiate(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Return the derivative of a spectrum (C, N, F, M) with respect to longitude."""
        cosine, sine = (part * self.zonal_number[:, None, None, None] for part in spectrum.chunk(2))
        return torch.cat([sine, -cosine])

    def synthesize(self, scalar: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
        """Return the grid (W, H, ...) of sum(scalar P + slope (1 - mu2) dP/dmu) from spectra (C, N, ...)."""
        table, number = self.to_latitude, len(self.zonal_number)  # (C, H, 2 N)
        spectrum = scalar if slope is None else torch.cat([scalar, slope], dim=1)
        rows = torch.bmm(table if slope is not None else table[:, :, :number], spectrum.flatten(2))
        return (self.to_longitude @ rows.flatten(1)).unflatten(1, (rows.shape[1], *scalar.shape[2:]))

    def compute_winds(self, scalar: torch.Tensor, zeta: torch.Tensor, div: torch.Tensor) -> tuple:
        """Return grids of scalars and of u and v (m s-1) times cos(latitude) from spectra (C, N, F, M)."""
        psi, chi = (field * self.inverse_laplacian[:, None, None] / RADIUS for field in (zeta, div))
        flat = torch.cat([scalar, self.differentiate(chi), self.differentiate(psi)], dim=2)
        slope = torch.cat([torch.zeros_like(scalar), -psi, chi], dim=2)
        return self.synthesize(flat, slope).split([scalar.shape[2], *[zeta.shape[2]] * 2], dim=2)

    def analyze(self, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return projections (C, N, ...) on P and (1 - mu2) dP/dmu of a grid given times cos2(latitude)."""
        rows = (self.from_longitude @ grid.flatten(1)).unflatten(1, (grid.shape[1], -1))  # (C, H, F M)
        return torch.bmm(self.from_latitude, rows).unflatten(2, grid.shape[2:]).chunk(2, dim=1)


class TwoLayerModel:
    """Model with states (C, N, 7, M): zeta1, zeta2, div1, div2, h1, h2, vapour. Layer 1 is the upper one."""

    def __init__(self, parameters: Parameters, dtype: torch.dtype) -> None:
        self.p, self.dtype = parameters, dtype
        self.mu, weights = np.polynomial.legendre.leggauss(NUM_LAT)  # sines of latitude, south to north
        self.transform = SphericalHarmonics(self.mu, RADIANS_EAST, TRUNCATION, weights, dtype)
        mu = torch.from_numpy(self.mu).to(dtype)[:, None, None]  # (H, 1, 1)
        self.cos2, self.coriolis = 1 - mu**2, 2 * ROTATION * mu
        self.reduced_gravity = GRAVITY * (1 - self.p.density_ratio)
        # Geopotential over the ground: g (h1 + h2) in layer 1 and g (ratio h1 + h2) in layer 2.
        self.gravity = GRAVITY * torch.tensor([[1.0, 1.0], [self.p.density_ratio, 1.0]], dtype=dtype)
        # Gravity waves about a state of rest: d/dt (div1, div2, h1, h2) = linear @ (div1, div2, h1, h2).
        self.linear = torch.zeros(TRUNCATION + 1, 4, 4, dtype=dtype)
        self.linear[:, :2, 2:] = -self.transform.laplacian[:, None, None] * self.gravity
        self.linear[:, 2, 0], self.linear[:, 3, 1] = -self.p.depth_upper, -self.p.depth_lower
        identity, spans = torch.eye(4, dtype=dtype), (self.p.step, 2 * self.p.step)
        self.implicit = {span: torch.linalg.inv(identity - span / 2 * self.linear) for span in spans}
        n = self.transform.zonal_number
        sharpness = (n * (n + 1) / (TRUNCATION * (TRUNCATION + 1))) ** 4
        self.damping = (1 / (1 + 2 * self.p.step / self.p.diffusion_time * sharpness))[:, None, None]
        # Radiative equilibrium: the shear u1 - u2, largest at 42 degrees, where 22 mu^4 (1 - mu^2)^2.5 = 1,
        # and the depth h1 in thermal-wind balance, g' dh1/dlat = -f a shear.
        mu = np.append(self.mu, np.linspace(-1, 1, 4001))
        shear = np.where(mu > 0, self.p.jet_north, self.p.jet_south) * 22.0 * mu**4 * (1 - mu**2) ** 2.5
        jets, mu, shear = shear[:NUM_LAT], mu[NUM_LAT:], shear[NUM_LAT:]
        cosine = np.sqrt(np.maximum(1 - mu**2, 1e-12))  # not zero at the poles, where the shear vanishes
        slope = -2 * ROTATION * RADIUS * mu * shear / cosine / self.reduced_gravity
        depth = np.append(0, np.cumsum((slope[1:] + slope[:-1]) / 2 * (mu[1] - mu[0])))
        depth = self.p.depth_upper + np.interp(self.mu, mu, depth - depth.mean())
        jets, depth = (torch.from_numpy(field).to(dtype)[:, None, None] for field in (jets, depth))
        self.jets = self.transform.analyze((jets * self.cos2.sqrt()).expand(NUM_LON, -1, 1, 1))[1] / RADIUS
        self.equilibrium = self.transform.analyze((depth * self.cos2).expand(NUM_LON, -1, 1, 1))[0]
        # Mountains are Gaussian in the great-circle distance from their centres.
        lat, lon = np.arcsin(self.mu), np.radians(LONGITUDE)[:, None]
        north, east, peak, width = np.reshape(self.p.mountains, (-1, 4)).T[:, :, None, None]
        north, east = np.radians(north), np.radians(east)
        cosine = np.sin(lat) * np.sin(north) + np.cos(lat) * np.cos(north) * np.cos(lon - east)
        height = (peak * np.exp(-((np.degrees(np.arccos(cosine.clip(-1, 1))) / width) ** 2))).sum(0)
        height = torch.from_numpy(height).to(dtype)[:, :, None, None]
        self.orography = self.transform.analyze(height * self.cos2)[0]
        height, land = self.compute_surface(self.transform)
        self.evaporation = (1 - 0.75 * land) / self.p.evaporation_time  # s-1
        self.column = torch.exp(-height.clamp(min=0) / self.p.vapour_scale_height)

    def compute_surface(self, transform: SphericalHarmonics) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the height (m) and land fraction: 0 up to 100 m to hide truncation ripples, 1 from 400 m."""
        height = transform.synthesize(self.orography)
        return height, ((height - 100.0) / 300.0).clamp(0, 1)

    def create_state(self, num_members: int, seed: int) -> torch.Tensor:
        """Return balanced jets in layer 1, air at rest in layer 2, and noise in vorticity for each member."""
        n, m = self.transform.zonal_number, self.transform.zonal_number.repeat(2)[:, None]
        state = torch.zeros(len(m), len(n), 7, num_members, dtype=self.dtype)
        state[:, :, :1], state[:, :, 4:5] = self.jets, self.equilibrium
        state[:, :, 5:6] = -self.p.density_ratio * self.equilibrium - self.orography  # no pressure gradient
        state[0, 0, 5] = self.p.depth_lower * np.sqrt(2) - self.orography[0, 0, 0]  # P_00 is 1 / sqrt(2)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(state[:, :, 0].shape, generator=generator, dtype=torch.float64).to(self.dtype)
        state[:, :, 0] += 2e-6 * noise * ((m > 0) & (m <= n) & (n <= 10))[:, :, None]
        return state

    def compute_tendencies(self, now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return d/dt of a state: motion at `now` and forcing at `before`, as leapfrog amplifies damping."""
        scalars = torch.cat([now[:, :, :2], now[:, :, 4:]], dim=2)
        fields, u, v = self.transform.compute_winds(scalars, now[:, :, :2], now[:, :, 2:4])
        fields[:, :, :2] += self.coriolis
        # With the wind of the same layer; indices would take three times as long.
        fluxes = [torch.cat([wind, wind, wind[:, :, 1:]], dim=2) * fields for wind in (u, v)]
        flat, slope = self.transform.analyze(torch.cat([*fluxes, (u**2 + v**2) / 2], dim=2))
        curl = (self.transform.differentiate(flat[:, :, 5:7]) + slope[:, :, :2]) / RADIUS  # by parts in mu
        divergence = (self.transform.differentiate(flat[:, :, :5]) - slope[:, :, 5:10]) / RADIUS
        potential = torch.einsum("ij,cnjm->cnim", self.gravity, now[:, :, 4:6]) + GRAVITY * self.orography
        acceleration = curl - self.transform.laplacian[:, None, None] * (flat[:, :, 10:] + potential)
        change = torch.cat([-divergence[:, :, :2], acceleration, -divergence[:, :, 2:]], dim=2)
        change[:, :, 1:4:2] -= before[:, :, 1:4:2] / self.p.drag_time  # vorticity and divergence of layer 2
        radiation = (self.equilibrium - before[:, :, 4:5]) / self.p.radiation_time
        change[:, :, 4:6] += torch.cat([radiation, -radiation], dim=2)  # one layer gains what the other loses
        h1, vapour = self.transform.synthesize(before[:, :, 4:7:2]).split(1, dim=2)
        # The geopotential between the levels, g' h1, gives the temperature. Saturation grows by 6 % a kelvin.
        warming = self.reduced_gravity * (h1 - self.p.depth_upper) / (287.0 * np.log(LEVELS[1] / LEVELS[0]))
        deficit = self.column * (self.p.saturation * torch.exp(0.06 * warming)) - vapour
        rate = torch.where(deficit > 0, self.evaporation, 1 / self.p.condensation_time)
        change[:, :, 6:] += self.transform.analyze(self.cos2 * rate * deficit)[0]
        return change

    def run(self, state: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
        """Yield the state after each of `num_steps` steps; the first step is a forward step."""
        before, now, span = state, state, self.p.step
        for _ in range(num_steps):
            change = self.compute_tendencies(now, before)
            # Implicit gravity waves: (1 - span/2 L) (after - before) = span (change + L (before - now)).
            change[:, :, 2:6] += self.linear @ (before - now)[:, :, 2:6]
            change[:, :, 2:6] = self.implicit[span] @ change[:, :, 2:6]
            after = (before + span * change) * self.damping
            before = now + self.p.filter_strength * (before - 2 * now + after)
            now, span = after, 2 * self.p.step
            yield now


@torch.inference_mode()
def simulate(num_years: int, num_days: int, seed: int, parameters: Parameters) -> xr.Dataset:
    """Return six-hourly weather of `num_days` days from 1 January of independent years, on the 64x32 grid,
    bit-exact on one machine. Raises ValueError if the flow blows up.
    """
    model = TwoLayerModel(parameters, torch.float32)
    interval, threads = round(6 * 3600 / parameters.step), torch.get_num_threads()
    start, end = (4 * interval * day for day in (parameters.spin_up_days, parameters.spin_up_days + num_days))
    states = enumerate(model.run(model.create_state(num_years, seed), end), start=1)
    # -- all years at once, each a column of the state
    torch.set_num_threads(1)  # 20 s; with two threads 16 s on an idle machine, up to 92 s on a busy one
    try:
        spectra = torch.stack([state for i, state in states if i > start and i % interval == 0], dim=-1)
    finally:
        torch.set_num_threads(threads)
    # -- the fields of ERA5's names and units, on the grid of its 64 x 32 stores
    if not spectra.isfinite().all():
        raise ValueError(f"parameters = {parameters}: the flow blew up; shorten step or weaken the jets")
    output = SphericalHarmonics(np.sin(np.radians(LATITUDE)), RADIANS_EAST, TRUNCATION, dtype=model.dtype)
    cosine = torch.from_numpy(np.cos(np.radians(LATITUDE))).float()[:, None, None]
    height, land = model.compute_surface(output)
    depth = torch.tensor([parameters.depth_upper, parameters.depth_lower])[:, None]
    mean = GRAVITY * height + torch.tensor([90_000.0, 14_300.0])[:, None]  # m2 s-2: means of ERA5 at LEVELS
    years = []
    for year in spectra.unbind(3):  # (C, N, 7, time); all years at once would need more memory
        fields, u, v = output.compute_winds(year[:, :, 4:], year[:, :, :2], year[:, :, 2:4])
        geopotential = mean + torch.einsum("ij,whjt->whit", model.gravity, fields[:, :, :2] - depth)
        vapour = fields[:, :, 2:].clamp(min=0)  # the truncated series is negative in dry air
        years.append(torch.cat([geopotential, u / cosine, v / cosine, vapour], dim=2))
    # -- a dataset as WeatherBench2's, so that it is read as any other source is
    dims = ("time", "level", "latitude", "longitude")
    record = xr.DataArray(torch.cat(years, dim=3).numpy().T, dims=dims)
    static = xr.DataArray(torch.cat([GRAVITY * height, land], dim=2).numpy().T[0], dims=dims[1:])
    hours = np.arange(4 * num_days) * np.timedelta64(6, "h")
    times = np.concatenate([np.datetime64(f"{FIRST_YEAR + year}", "ns") + hours for year in range(num_years)])
    dataset = xr.Dataset(coords=dict(zip(dims, (times, list(LEVELS), LATITUDE, LONGITUDE), strict=True)))
    upper = ("geopotential", "u_component_of_wind", "v_component_of_wind")
    for number, name in enumerate(upper):
        dataset[name] = record[:, 2 * number : 2 * number + 2]
    dataset["total_column_water_vapour"] = record[:, 6]
    dataset["geopotential_at_surface"], dataset["land_sea_mask"] = static
    for name in dataset.data_vars:
        dataset[name].attrs["units"] = units(str(name))
    return dataset


class RandomFields(TrainingStore):
    """Normally distributed noise in a variable's usual range, another one for each date, every `step_hours`.

    Dates are those between the first and the last of all periods; without a training period, those of the
    year before, too. A field is the noise of its variable, turned by a number of columns that depends on the
    date: drawing a new one would take as long as a step. Moments are given by their formulas. For profiling,
    rehearsals and tests on a GPU of any configuration.
    """

    def __init__(self, data: Data) -> None:
        """Raises ConfigError without data.grid_shape."""
        rows, columns = data.grid_shape
        if rows < 2 or columns < 2:
            refuse("data.grid_shape", [rows, columns], 'with data.path = "random" name the rows and columns')
        self.grid = global_grid((rows, columns), poles=rows % 2 == 1)
        if data.region:
            north, west, south, east = data.region
            width = (east - west) % 360 or 360
            longitude = west + np.linspace(0, width, columns, endpoint=width < 360)
            self.grid = Grid(np.linspace(north, south, rows), longitude)
        self.path, self.unreadable, self.extra_dimensions = RANDOM, {}, {}
        self.variables = self.names = Channels.of(data).variables
        self.static_variables = list(data.static_variables)
        periods = ("train_period", "validation_period", "test_period")
        spans = [parse_period(f"data.{name}", getattr(data, name)) for name in periods]
        ends = [np.datetime64(end, "s") for span in spans if span for end in span]
        ends = ends or [np.datetime64("2002-01-01", "s")]
        first = min(ends) if data.train_period else min(ends) - ONE_YEAR
        self.change_step = np.timedelta64(3600 * data.step_hours, "s")
        self.times = np.arange(first, max(ends) + np.timedelta64(1, "s"), self.change_step)
        self.shifts = {name: self.scale(name)[0] for name in self.variables}
        self._noise = dict[str, np.ndarray]()

    def find(self, name: str) -> list:
        """Return no place: nothing is in a file, and there is nothing to check."""
        return []

    def check(self, variables, every_date: bool = False) -> None:
        pass

    def has(self, variables) -> np.ndarray:
        return np.ones(len(self.times), bool)

    def scale(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of a variable, 0 and 1 where its usual range is not known."""
        low, high = usual_range(name)
        if not np.isfinite([low, high]).all():
            return 0.0, 1.0
        return (low + high) / 2, (high - low) / NOISE_DEVIATIONS

    def noise(self, name: str) -> np.ndarray:
        """Return the noise (H, W) float32 of a variable, which is drawn once."""
        if name not in self._noise:
            (mean, std), limit = self.scale(name), NOISE_DEVIATIONS / 2
            noise = np.random.default_rng(crc32(name.encode())).standard_normal(self.grid.shape, np.float32)
            noise = noise.clip(-limit, limit)
            self._noise[name] = np.float32(mean) + np.float32(std) * noise
        return self._noise[name]

    def fill(self, date: int, variables, out: np.ndarray) -> None:
        """Fill `out` (V, H, W) float32 with the fields at times[date]."""
        for name, field in zip(variables, out, strict=True):
            text = f"{name} {self.times[date]}"
            turn = 1 + crc32(text.encode()) % (self.grid.shape[1] - 1)
            noise = self.noise(name)
            field[:, :turn], field[:, turn:] = noise[:, -turn:], noise[:, :-turn]

    def read_static(self, name: str) -> np.ndarray:
        """Return a constant field (H, W) float32; 0 and 1 for the land-sea mask."""
        noise = self.noise(name)
        return (noise > noise.mean()).astype(np.float32) if name == "land_sea_mask" else noise

    def rows(self, variables) -> np.ndarray:
        cells = float(self.grid.shape[0] * self.grid.shape[1])
        rows = np.zeros((1, len(variables), 9))
        for v, name in enumerate(variables):
            variance = self.scale(name)[1] ** 2
            rows[0, v] = [0, 0, 0, cells, 0, cells * variance, cells, 0, 2 * cells * variance]
        return np.broadcast_to(rows, (len(self.times), *rows.shape[1:]))
